// An encoder of animated GIFs (GIF89a): a palette of its own for each frame, LZW as in the format's appendix F.

const COLORS = 256;
const MOST_CODES = 4096;

const word = (value) => [value & 255, value >> 8];

export class Gif {
  constructor(width, height) {
    [this.width, this.height] = [width, height];
    // No global palette; the extension repeats the animation forever.
    const screen = [...word(width), ...word(height), 0, 0, 0];
    this.parts = [Uint8Array.from([...ascii("GIF89a"), ...screen, 0x21, 0xff, 11, ...ascii("NETSCAPE2.0"), 3, 1, 0, 0, 0])];
  }

  /** Add a frame: its RGBA bytes, and how long it is shown, ms. */
  add(rgba, milliseconds) {
    const { palette, pixels } = quantized(rgba);
    const control = [0x21, 0xf9, 4, 0, ...word(Math.round(milliseconds / 10)), 0, 0];
    const image = [0x2c, 0, 0, 0, 0, ...word(this.width), ...word(this.height), 0x87]; // 0x87: 256 colours follow
    this.parts.push(Uint8Array.from([...control, ...image]), palette, Uint8Array.of(8), ...blocks(compressed(pixels)));
  }

  /** The file, in parts. */
  end() {
    return [...this.parts, Uint8Array.of(0x3b)];
  }
}

const ascii = (text) => Array.from(text, (character) => character.charCodeAt(0));

/** The 256 most frequent colours of an image, in 5 bits per channel each, and the nearest of them for each pixel. */
function quantized(rgba) {
  const keys = new Uint16Array(rgba.length / 4);
  const counts = new Uint32Array(1 << 15);
  const exact = new Uint32Array(1 << 15); // a colour that has the key
  for (let at = 0; at < keys.length; at++) {
    const [red, green, blue] = [rgba[4 * at], rgba[4 * at + 1], rgba[4 * at + 2]];
    const key = ((red >> 3) << 10) | ((green >> 3) << 5) | (blue >> 3);
    keys[at] = key;
    if (!counts[key]++) exact[key] = (red << 16) | (green << 8) | blue;
  }
  const used = Array.from(counts.keys()).filter((key) => counts[key]);
  used.sort((a, b) => counts[b] - counts[a]);
  const kept = used.slice(0, COLORS);
  const palette = new Uint8Array(3 * COLORS);
  const channels = (color) => [color >> 16, (color >> 8) & 255, color & 255];
  kept.forEach((key, index) => palette.set(channels(exact[key]), 3 * index));
  const indices = new Uint8Array(1 << 15);
  used.forEach((key, rank) => (indices[key] = rank < COLORS ? rank : nearest(channels(exact[key]), palette, kept.length)));
  return { palette, pixels: keys.map((key) => indices[key]) };
}

function nearest([red, green, blue], palette, count) {
  let [best, least] = [0, Infinity];
  for (let index = 0; index < count; index++) {
    const distance = (palette[3 * index] - red) ** 2 + (palette[3 * index + 1] - green) ** 2 + (palette[3 * index + 2] - blue) ** 2;
    if (distance < least) [best, least] = [index, distance];
  }
  return best;
}

/** The pixels' LZW codes, packed from the lowest bit on. */
function compressed(pixels) {
  const [clear, end] = [COLORS, COLORS + 1];
  const bytes = [];
  let [bits, filled, size] = [0, 0, 9];
  const put = (code) => {
    bits |= code << filled;
    for (filled += size; filled >= 8; filled -= 8, bits >>>= 8) bytes.push(bits & 255);
  };
  let codes = new Map(); // the code of a known sequence followed by a pixel
  let next = end + 1;
  put(clear);
  let prefix = pixels[0];
  for (let at = 1; at < pixels.length; at++) {
    const longer = (prefix << 8) | pixels[at];
    const known = codes.get(longer);
    if (known !== undefined) {
      prefix = known;
      continue;
    }
    put(prefix);
    if (next === MOST_CODES) {
      put(clear);
      [codes, next, size] = [new Map(), end + 1, 9];
    } else {
      if (next === 1 << size) size++;
      codes.set(longer, next++);
    }
    prefix = pixels[at];
  }
  put(prefix);
  put(end);
  if (filled) bytes.push(bits & 255);
  return bytes;
}

/** Data in blocks of up to 255 bytes, each after its length; an empty one ends them. */
function* blocks(bytes) {
  for (let at = 0; at < bytes.length; at += 255) {
    const block = bytes.slice(at, at + 255);
    yield Uint8Array.of(block.length, ...block);
  }
  yield Uint8Array.of(0);
}
