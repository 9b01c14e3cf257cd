"""What one request may ask for: every limit that an operator sets, and the one rule by which they are kept.

Fields are named as the server's flags. Limits that belong to the interface itself (32 stop strings, 256 bytes of a
stop pattern) stand with its types; those of a grammar's text with the grammars; that of a body's bytes with its reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tracklayer.errors import UserError


def limit(what: str) -> int | None:
    """A limit, none unless it is set; `what` is said of who goes beyond it."""
    made: int | None = field(default=None, metadata={"what": what})
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None is no limit."""

    max_batch_prompts: int | None = limit("prompts in one request")
    max_samples: int | None = limit("samples of one prompt (n)")
    max_batch_sequences: int | None = limit("sequences in one request (prompts times n)")
    max_stop_characters: int | None = limit("characters of stop strings together")
    max_top_logprobs: int | None = limit("top_logprobs_num, or ids in token_ids_logprob,")

    def check(self, name: str, asked: int) -> None:
        """Raise UserError when `asked` is more than the limit of this name."""
        most: int | None = getattr(self, name)
        if most is not None and asked > most:
            what = self.__dataclass_fields__[name].metadata["what"]
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{what} may be at most {most} here, got {asked}; ask for less, or raise the server's {flag}"
            )
