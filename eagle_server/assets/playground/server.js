// Requests to the server, and the events of its streams.

/** An error that the server (or the network) gave, in words for people. */
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The key in UTF-8, each byte as a character, which is how fetch takes one; others than ASCII would fail otherwise. */
function headers(key) {
  const bytes = new TextEncoder().encode(key);
  return key ? { authorization: `Bearer ${String.fromCharCode(...bytes)}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? response.statusText;
  throw new Refusal(`${said} (status ${response.status})`, response.status);
}

async function fetched(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached.");
  }
}

export async function get(path, key) {
  return (await checked(await fetched(path, { headers: headers(key) }))).json();
}

/** The events of a streaming request, parsed; an error event is thrown. */
export async function* events(path, body, key, signal) {
  const response = await checked(
    await fetched(path, {
      method: "POST",
      headers: { "content-type": "application/json", ...headers(key) },
      body: JSON.stringify(body),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refusal("The connection was lost before the answer ended.");
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(":")) continue; // a comment, which keeps the connection
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(event.error.message);
      yield event;
    }
  }
}
