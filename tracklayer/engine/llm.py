"""The offline API: `tracklayer.Engine`, a model in this process, asked from plain or asyncio Python.

The front end runs on an event loop in a thread of its own; every method here hands it a coroutine.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from tracklayer.config import EngineConfig, json_object, load_model_config
from tracklayer.engine.client import EngineClient
from tracklayer.engine.control_plane import ControlPlane, Outcome
from tracklayer.engine.flags import SERVER_FLAGS, foreign, plain_name, unknown_flag
from tracklayer.engine.frontend import TextFrontend
from tracklayer.engine.intake import GenerateCall, Intake
from tracklayer.engine.loop_thread import LoopThread
from tracklayer.engine.progress import ProgressBar
from tracklayer.engine.reply import reply
from tracklayer.engine.sample import Sample
from tracklayer.engine.tokenizer import TextTokenizer, load_tokenizer
from tracklayer.errors import UserError

T = TypeVar("T")
TEXT_OPTIONS = ("chat_template", "trust_remote_code", "log_level", "served_model_name")
INTAKE_OPTIONS = ("allow_auto_truncate", "preferred_sampling_params", "stream_interval")
Messages = list[dict[str, Any]]
# what collective_rpc may call
RPC_METHODS = (
    "flush_cache",
    "pause_generation",
    "continue_generation",
    "abort_request",
    "update_weights_from_disk",
    "update_weight_version",
    "begin_weight_update",
    "end_weight_update",
    "get_weights_by_name",
    "check_weights",
    "release_memory_occupation",
    "resume_memory_occupation",
    "start_profile",
    "stop_profile",
    "freeze_gc",
)


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What flush_cache answers."""

    success: bool


def engine_options(options: dict[str, Any]) -> tuple[EngineConfig, dict[str, Any]]:
    """(EngineConfig, other options) from Engine's keywords. Raises TypeError for an unknown one, naming the nearest."""
    own = {f.name for f in fields(EngineConfig)}
    config, text = {}, {}
    for key, value in options.items():
        name = plain_name(key)
        if name in own:
            config[name] = value
        elif name in TEXT_OPTIONS + INTAKE_OPTIONS:
            text[name] = value
        elif name in SERVER_FLAGS:
            warnings.warn(f"{name} has no effect: it is the HTTP server's", stacklevel=3)
        else:
            try:
                line = foreign(name, value)
            except KeyError:
                message = unknown_flag(name, [*own, *TEXT_OPTIONS, *INTAKE_OPTIONS]).replace("--", "").replace("-", "_")
                raise TypeError(f"Engine: {message}") from None
            except ValueError as error:
                raise UserError(str(error)) from None
            if line:
                warnings.warn(line, stacklevel=3)
    return EngineConfig(**config), text


class Engine:
    """A model ready to generate. Keywords are EngineConfig's fields and the server's flags that matter here.

    Those are chat_template, trust_remote_code, allow_auto_truncate, preferred_sampling_params (a dict or JSON) and
    stream_interval; others of the server's, and SGLang's without effect, warn.

    Answers have SGLang's shape; `meta_info["routed_experts"]` is a `tracklayer.Routes`.

        with Engine("model_dir", enable_return_routed_experts=True) as engine:
            answer = engine.generate("The capital of France is", {"temperature": 0}, return_routed_experts=True)
            answer["text"], answer["meta_info"]["routed_experts"]

    Raises TypeError for an unknown keyword, CheckpointError or UserError for what can not be loaded.
    """

    def __init__(self, model_path: str, **options: Any) -> None:
        config, text = engine_options({**options, "model_path": model_path})
        load_model_config(config.model_path, config.json_model_override_args)  # what is no checkpoint has no tokenizer
        tokenizer = None
        if not config.skip_tokenizer_init:
            tokenizer = load_tokenizer(
                config.tokenizer_path or config.model_path,
                chat_template=text.get("chat_template"),
                trust_remote_code=bool(text.get("trust_remote_code")),
            )
        from tracklayer.engine.thread import EngineThread

        self._open(EngineThread(config), tokenizer, config, text)
        self._served_name = text.get("served_model_name") or config.model_path

    @classmethod
    def over(
        cls,
        client: EngineClient,
        tokenizer: TextTokenizer | None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> Engine:
        """An Engine over a client that already runs. `options`: those of INTAKE_OPTIONS."""
        engine = cls.__new__(cls)
        engine._open(client, tokenizer, config or EngineConfig(model_path=client.info.model_path), options)
        engine._served_name = client.info.model_path
        return engine

    def _open(
        self,
        client: EngineClient,
        tokenizer: TextTokenizer | None,
        config: EngineConfig,
        options: dict[str, Any],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._client = client
        self._thread = LoopThread()
        intake = Intake(
            client.info,
            tokenizer,
            random_seed=config.random_seed,
            default_sampling=json_object(options.get("preferred_sampling_params"), "preferred_sampling_params"),
            auto_truncate=bool(options.get("allow_auto_truncate")),
            stream_interval=options.get("stream_interval") or 1,
        )
        self._frontend = TextFrontend(client, tokenizer, intake=intake, weight_version=config.weight_version)
        self._control = ControlPlane(self._frontend, model_path=config.model_path)
        self._frontend.bind(self._thread.loop)
        self._closed = False
        atexit.register(self.shutdown)  # torch does not bear that its thread is torn away in the middle of a step

    # generating

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Any = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        messages: Messages | list[Messages] | None = None,
        stream: bool = False,
        progress: bool | None = None,
        **fields_of_call: Any,
    ) -> Any:
        """Text, token ids, or chat messages, one or a list; every field of GenerateCall as keyword.

        Returns a dict, or a list of dicts (a list was given, or n > 1) by prompt, then by sample; with `stream` an
        iterator of cumulative dicts. `progress`: a bar on stderr (default: for lists, on a terminal).
        Raises UserError for what can never succeed.
        """
        call = self._call(prompt, sampling_params, input_ids, messages, stream, fields_of_call)
        if stream:
            return self._iterate(call)
        if progress is None:
            progress = call.batched and sys.stderr.isatty()
        if not progress:
            return self._thread.run(self._answer(call))
        with ProgressBar(call) as ended:
            return self._thread.run(self._answer(call, ended))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Any = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        messages: Messages | list[Messages] | None = None,
        stream: bool = False,
        **fields_of_call: Any,
    ) -> Any:
        """`generate` for asyncio; with `stream` an async iterator. Cancelling it aborts the requests."""
        call = self._call(prompt, sampling_params, input_ids, messages, stream, fields_of_call)
        if stream:
            return self._aiterate(call)
        return await asyncio.wrap_future(self._thread.submit(self._answer(call)))

    def _call(
        self, prompt: Any, sampling: Any, ids: Any, messages: Any, stream: bool, given: dict[str, Any]
    ) -> GenerateCall:
        if messages is not None:
            if prompt is not None or ids is not None:
                raise UserError("give messages, prompt or input_ids, not several")
            ids = self._chat_ids(messages)
        known = set(GenerateCall.__dataclass_fields__)
        for name in given:
            if name not in known:
                raise TypeError(f"generate() has no argument {name!r}; it takes {', '.join(sorted(known))}")
        return GenerateCall(text=prompt, input_ids=ids, sampling_params=sampling, stream=stream, **given)

    def _chat_ids(self, messages: Any) -> Any:
        if self.tokenizer is None:
            raise UserError("messages need a tokenizer, which skip_tokenizer_init left out")
        if messages and isinstance(messages[0], list):
            return [self.tokenizer.chat_ids(one) for one in messages]
        return self.tokenizer.chat_ids(messages)

    async def _answer(self, call: GenerateCall, ended: Callable[[Sample], None] | None = None) -> Any:
        samples = await self._frontend.generate(call, ended)
        answers = [self._reply(sample, call) for sample in samples]
        return answers if call.batched or len(answers) > 1 else answers[0]

    def _reply(self, sample: Sample, call: GenerateCall) -> dict[str, Any]:
        return reply(sample, self._frontend.weight_version, prompt_ids=call.return_prompt_token_ids)

    async def _chunks(self, call: GenerateCall) -> AsyncIterator[dict[str, Any]]:
        async for sample in self._frontend.stream(call):
            chunk = self._reply(sample, call)
            if call.batched or sample.request.sampling.n > 1:
                chunk["index"] = sample.index
            yield chunk

    def _iterate(self, call: GenerateCall) -> Iterator[dict[str, Any]]:
        chunks = self._chunks(call)
        try:
            while (chunk := self._thread.run(_next(chunks))) is not None:
                yield chunk
        finally:
            if not self._closed:
                self._thread.run(_close(chunks))

    async def _aiterate(self, call: GenerateCall) -> AsyncIterator[dict[str, Any]]:
        chunks = self._chunks(call)
        try:
            while (chunk := await asyncio.wrap_future(self._thread.submit(_next(chunks)))) is not None:
                yield chunk
        finally:
            if not self._closed:
                await asyncio.wrap_future(self._thread.submit(_close(chunks)))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End requests whose id begins with `rid`, or all; they return what they have with type abort."""
        self._thread.run(self._abort(rid, abort_all))

    async def _abort(self, rid: str, everything: bool) -> None:
        self._frontend.abort(rid, everything=everything)

    # control

    def flush_cache(self) -> FlushResult:
        return FlushResult(self._thread.run(self._control.flush_cache()))

    def pause_generation(self, mode: str = "abort") -> None:
        self._thread.run(self._control.pause(mode))

    def continue_generation(self) -> None:
        self._thread.run(self._control.resume())

    def update_weights_from_disk(self, model_path: str, load_format: str | None = None, **options: Any) -> Outcome:
        """(success, message). Keywords: flush_cache, abort_all_requests, weight_version."""
        work = self._control.update_weights_from_disk(model_path, load_format=load_format, **options)
        return self._thread.run(work)

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> Outcome:
        work = self._control.update_weight_version(new_version, abort_all_requests=abort_all_requests)
        return self._thread.run(work)

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        return self._thread.run(self._control.get_weights_by_name(name, truncate_size))

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._thread.run(self._control.release_memory(tags))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._thread.run(self._control.resume_memory(tags))

    def begin_weight_update(self, selector: str = "all") -> Outcome:
        """Updates need no bracket; it is there for callers who send one."""
        return True, "Nothing to do: weight updates need no bracket."

    def end_weight_update(self) -> Outcome:
        return self.begin_weight_update()

    def check_weights(self, action: str = "checksum", skip_tensor_list: list[str] | None = None) -> dict[str, Any]:
        """checksum, snapshot, reset_tensors or compare: {success, message, ...} as /weights_checker answers."""
        success, message, more = self._thread.run(self._control.check_weights(action, skip_tensor_list))
        return {"success": success, "message": message, **more}

    def start_profile(self, output_dir: str | None = None, **order: Any) -> None:
        """Profile the engine's steps. Keywords: start_step, num_steps, activities, with_stack, record_shapes."""
        self._thread.run(self._control.start_profile(output_dir, **order))

    def stop_profile(self) -> str | None:
        """The path of the trace, None when the profile had not begun."""
        return self._thread.run(self._control.stop_profile())

    def freeze_gc(self) -> None:
        """Keep what lives now out of later garbage collections."""
        self._thread.run(self._control.freeze_gc())

    def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        """What the control method of this name answers, once for each rank: there is one.

        Raises UserError for a name that is not among RPC_METHODS, TypeError for arguments the method does not take.
        """
        if method not in RPC_METHODS:
            raise UserError(f"collective_rpc: no method {method!r}; there are {', '.join(RPC_METHODS)}")
        return [getattr(self, method)(**arguments)]

    def get_server_info(self) -> dict[str, Any]:
        """The configuration, the engine's facts, and its load now."""
        config = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        return {**config, **self._thread.run(self._control.server_info())}

    def get_model_info(self) -> dict[str, Any]:
        return self._control.model_info(self._served_name, self.config.tokenizer_path or self.config.model_path)

    def shutdown(self) -> None:
        """Stop the engine and give its memory back; running requests end with type abort. May be called twice."""
        if self._closed or not self._thread.here:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        self._client.shutdown()
        self._thread.run(self._fail_rest())
        self._frontend.close()
        self._thread.close()

    async def _fail_rest(self) -> None:
        self._frontend.fail_all("the engine was shut down")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


async def _next(chunks: AsyncIterator[T]) -> T | None:
    return await anext(chunks, None)


async def _close(chunks: Any) -> None:
    await chunks.aclose()
