"""The tokenizer as the front end needs it: encode, decode, chat template, special tokens. Thread-safe."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracklayer.errors import CheckpointError, UserError


class TextTokenizer:
    """A Hugging Face tokenizer behind a small, thread-safe face.

    Fast tokenizers go straight to their Rust object, which may be shared by threads; slow ones take a lock.

    Attributes: `eos_token_ids`; `special_tokens`: content -> id of every special token (a stop string that is one
    of these is matched by id); `chat_template`: the template's text or None.
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
