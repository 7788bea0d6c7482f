"""`eagle-server train prepare`: token rows of conversations, of texts and of token rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_server.text.chat_template import TemplateError
from eagle_tools.training.rows.chat_records import CONVERSATION_KEYS, ChatRecord, RecordReader
from eagle_tools.training.rows.masking import ChatModel, MaskError, token_rows
from eagle_tools.training.rows.token_rows import TOKENS, RowError, TokenRow, numbered_objects, row_id, token_row

_PREFORMATTED = ({"text"}, {"prompt", "completion"})


@dataclass(frozen=True)
class Preparation:
    """How rows are made.

    preformatted: rows are texts that need no template, {"text"} or {"prompt", "completion"}.
    variables: chat_template_kwargs of every conversation that does not set them.
    """

    model: ChatModel
    preformatted: bool = False
    ignored: frozenset[str] = frozenset()
    variables: Mapping[str, Any] | None = None

    def rows(self, file: Path) -> Iterator[TokenRow]:
        """The token rows of a file.

        Raises:
            RowError: a row is of no known kind, or its answers cannot be told from its prompt.
        """
        reader = RecordReader(file, self.ignored)
        for number, values in numbered_objects(file):
            kept = {key: value for key, value in values.items() if key not in self.ignored}
            if TOKENS in kept:
                yield token_row(file, number, kept)
            elif self.preformatted:
                yield self._of_text(file, number, kept)
            elif "text" in kept or "completion" in kept:
                raise RowError(file, number, "a text and no conversation: --preformatted takes it as it is")
            elif not any(key in kept for key in CONVERSATION_KEYS):
                raise RowError(file, number, f"none of {TOKENS}, {', '.join(CONVERSATION_KEYS)} is here")
            else:
                try:
                    yield from token_rows(self.model, self._with_variables(reader.record(number, values)))
                except (MaskError, TemplateError) as error:
                    raise RowError(file, number, str(error)) from None

    def _with_variables(self, record: ChatRecord) -> ChatRecord:
        return replace(record, variables={**(self.variables or {}), **record.variables})

    def _of_text(self, file: Path, number: int, values: Mapping[str, Any]) -> TokenRow:
        """A row of a finished text: all of it counts, or its completion."""
        texts = {key: value for key, value in values.items() if key != "id"}
        if set(texts) not in _PREFORMATTED or not all(isinstance(text, str) for text in texts.values()):
            raise RowError(file, number, "--preformatted rows are {text} or {prompt, completion}, with an id or not")
        prompt = self.model.tokenizer.encode(texts.get("prompt", ""), special=False) if "prompt" in texts else []
        written = self.model.tokenizer.encode(texts.get("text", texts.get("completion", "")), special=False)
        if not written:
            raise RowError(file, number, "the text has no tokens")
        mask = (0,) * len(prompt) + (1,) * len(written)
        return TokenRow(row_id(file, number, values), 0, (*prompt, *written), mask)


def prepare(preparation: Preparation, files: Sequence[Path], out: Path) -> Counter[str]:
    """Write the rows of `files` to `out`, and return counts: rows, tokens, supervised tokens.

    Nothing is written if a row is refused.

    Raises:
        RowError: as `Preparation.rows`, or an id occurs twice.
    """
    counts: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.part")
    try:
        with temporary.open("w", encoding="utf-8") as lines:
            for file in files:
                for row in tqdm(preparation.rows(file), desc=file.name, unit="row"):
                    if (row.id, row.gen) in seen:
                        raise ValueError(f"{file}: the id {row.id!r} occurs twice (gen {row.gen})")
                    seen.add((row.id, row.gen))
                    lines.write(row.line() + "\n")
                    counts.update(rows=1, tokens=len(row.input_ids), supervised=row.supervised)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return counts
