"""The tokenizer as the front end needs it: encode, decode, chat template, special tokens. Thread-safe."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracklayer.errors import CheckpointError, UserError


class BytePieces:
    """The bytes of each token of a byte-level vocabulary, whose text is the UTF-8 of its tokens' bytes in a row.

    So says `tokenizers` of its ByteLevel decoder: a token whose characters all stand for bytes is these bytes, any
    other (an added one) its own text.
    """

    def __init__(self, fast: Any) -> None:
        self._token_of = fast.id_to_token
        self._known: dict[int, bytes] = {}
        self._skipped = frozenset(i for i, token in fast.get_added_tokens_decoder().items() if token.special)

    @staticmethod
    def of(fast: Any) -> BytePieces | None:
        """None for a tokenizer of another kind."""
        decoder = json.loads(fast.to_str())["decoder"] if fast is not None else None
        return BytePieces(fast) if decoder is not None and decoder["type"] == "ByteLevel" else None

    def join(self, ids: Sequence[int], *, skip_special: bool) -> bytes:
        """What `ids` add to a text; unknown ids add nothing."""
        known, skipped = self._known, self._skipped if skip_special else frozenset()
        pieces = []
        for i in ids:
            piece = known.get(i)
            if piece is None:
                token = self._token_of(i) or ""
                stands = [_BYTE_OF.get(c) for c in token]
                piece = known[i] = token.encode() if None in stands else bytes(b for b in stands if b is not None)
            if i not in skipped:
                pieces.append(piece)
        return b"".join(pieces)


def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    hidden = (b for b in range(256) if b not in set(shown))
    return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTE_OF = _byte_of()


class TextTokenizer:
    """A Hugging Face tokenizer behind a small, thread-safe face.

    Fast tokenizers go straight to their Rust object, which may be shared by threads; slow ones take a lock.

    Attributes: `eos_token_ids`; `byte_pieces`: of a byte-level vocabulary, else None; `special_tokens`: content -> id
    of every special token (a stop string that is one of these is matched by id); `chat_template`: the template's text
    or None.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self._hf = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self.chat_template: str | None = tokenizer.chat_template
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        added = tokenizer.added_tokens_decoder
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.byte_pieces = BytePieces.of(self._fast)
        eos = tokenizer.eos_token_id
        self.eos_token_ids = frozenset() if eos is None else frozenset([int(eos)])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._fast is not None:
            # unlike `encode`, the batch form lets other threads run meanwhile
            return list(self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        with self._lock:
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between: bool = True) -> str:
        """Text of `ids`; an incomplete character reads as U+FFFD. `spaces_between` matters to slow tokenizers only."""
        if self._fast is not None:
            return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))
        with self._lock:
            return str(
                self._hf.decode(
                    ids, skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces_between
                )
            )

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special tokens shown."""
        return self.decode([token_id], skip_special_tokens=False)

    def chat_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_arguments: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation through the chat template, ready for the assistant's answer.

        Raises UserError when there is no template, no message, or the template refuses the conversation.
        """
        from jinja2 import TemplateError

        if not self.chat_template:
            raise UserError("this tokenizer has no chat template: give one with --chat-template FILE, or send a prompt")
        if not messages:
            raise UserError("messages must hold at least one message")
        own = set(inspect.signature(self._hf.apply_chat_template).parameters) - {"documents", "kwargs"}
        for name in template_arguments or {}:
            if name in own or name == "self":  # one of the tokenizer, not of the template: another template, say
                raise UserError(f"chat_template_kwargs may not hold {name!r}: it is not a variable of the template")
        plain = [{**m, "content": _flat_content(m.get("content"))} for m in messages]
        try:
            text = self._hf.apply_chat_template(
                plain,
                tools=tools,
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                **(template_arguments or {}),
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise UserError(f"the chat template refused these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)


def _flat_content(content: Any) -> str | None:
    """A message's content as one string: a list of text parts is joined. Raises UserError for other kinds of part."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UserError(f"message content must be text or a list of parts, got {content!r}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise UserError(f"message content part {kind!r} is not text; this model takes text only")
        texts.append(part["text"])
    return "".join(texts)


def load_tokenizer(path: str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> TextTokenizer:
    """The tokenizer of a checkpoint directory. `chat_template`: a template file, or the template itself.

    Raises CheckpointError when there is none there that transformers can read.
    """
    if not Path(path).is_dir():
        raise CheckpointError(
            f"{path!r} is not a directory; give a checkpoint's, in Hugging Face layout (nothing is fetched from a hub)"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"no tokenizer could be read from {path!r} ({str(error).splitlines()[0]}); give --tokenizer-path DIR, "
            "or --skip-tokenizer-init to work with token ids only"
        ) from error
    if chat_template is not None and Path(chat_template).is_file():
        chat_template = Path(chat_template).read_text()
    return TextTokenizer(tokenizer, chat_template=chat_template)
