"""What one request may ask for: every limit that an operator sets, and the one rule by which they are kept.

Fields are named as the server's flags. Limits that belong to the interface itself (32 stop strings, 256 bytes of a
stop pattern) stand with its types; those of a grammar's text with the grammars; that of a body's bytes with its reader.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields

from tracklayer.config import flag
from tracklayer.errors import UserError


def limit(most: int, what: str) -> int:
    """A server's flag, `most` unless it is set; `what` is said in its help, and of who goes beyond it."""
    made: int = flag(most, f"{what} at most", low=1, what=what)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The defaults are a server's; an engine in the caller's own process has `NO_LIMITS`."""

    max_batch_prompts: int = limit(4096, "prompts in one request")
    max_samples: int = limit(512, "samples of one prompt (n)")
    max_batch_sequences: int = limit(65536, "sequences in one request (prompts times n)")
    max_stop_characters: int = limit(4096, "characters of stop strings together")
    max_top_logprobs: int = limit(256, "top_logprobs_num, or ids in token_ids_logprob,")

    def check(self, name: str, asked: int) -> None:
        """Raise UserError when `asked` is more than the limit of this name."""
        most: int = getattr(self, name)
        if asked > most:
            what = self.__dataclass_fields__[name].metadata["what"]
            raise UserError(
                f"{what} may be at most {most} here, got {asked}; ask for less, or raise the server's "
                f"--{name.replace('_', '-')}"
            )


NO_LIMITS = Limits(**dict.fromkeys((f.name for f in fields(Limits)), sys.maxsize))
