"""Events of a /generate stream that carries text, ids and counts alone, written from pieces that are kept."""

from __future__ import annotations

from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.sample import Sample
from tracklayer.server.io import quoted


class PlainEvents:
    """The events of one sample until its last, byte for byte those of `reply`.

    Of a growing stream only the new ids are written anew, and the fields that stay as they are not at all.
    """

    def __init__(self, sample: Sample, *, indexed: bool) -> None:
        self._ids, self._count = "", 0
        self._text, self._quoted = "", '"'  # the text so far, and as JSON less its last quote
        self._head = f'],"meta_info":{{"id":{quoted(sample.rid)},"finish_reason":null,"prompt_tokens":'
        self._head += f'{sample.prompt_tokens},"completion_tokens":'
        self._tail = (f'}},"index":{sample.index}}}' if indexed else "}}") + "\n\n"

    @staticmethod
    def fits(call: GenerateCall, sample: Sample) -> bool:
        """Whether an event that is not the last has nothing beside text, ids and counts."""
        request = sample.request
        more = request.return_logprob or request.top_logprobs_num or request.token_ids_logprob
        return not (more or call.return_prompt_token_ids)

    def event(self, sample: Sample, weight_version: str) -> bytes:
        """Everything so far. `weight_version` as in `reply`."""
        text, ids = sample.text, sample.output_ids
        if new := ids[self._count :]:
            self._ids += ("," if self._count else "") + ",".join(map(str, new))
            self._count = len(ids)
        version = sample.weight_spans[-1][0] if sample.weight_spans else weight_version
        shown = ""
        if text is not None:
            known = len(self._text)
            if text[:known] != self._text:  # a stop string that may come took some back
                known, self._quoted = 0, '"'
            if len(text) > known:
                self._quoted += quoted(text[known:])[1:-1]
            self._text = text
            shown = f'"text":{self._quoted}",'
        return (
            f'data: {{{shown}"output_ids":[{self._ids}'
            f'{self._head}{self._count},"cached_tokens":{sample.cached_tokens},"reasoning_tokens":0,'
            f'"num_retractions":{sample.num_retractions},"weight_version":{quoted(version)}{self._tail}'
        ).encode()
