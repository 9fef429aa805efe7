"""`swift infer`: answers of a model, a checkpoint or an adapter, in a chat at the terminal or for a dataset.

With `--val_dataset` or `--dataset` one answer per row is written to `--result_path`, in the order of the rows. Without
a dataset it is a chat: answers are printed while they are sampled, and `/reset`, `/system TEXT` and `/exit` are
commands. `--temperature 0` is greedy decoding.

With several processes (NPROC_PER_NODE) each answers every N-th row. The seed of a row depends on the row only, so the
answers do not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from swift.data.image_store import remember, with_files
from swift.data.images import ImageSource, read_image
from swift.data.records import RowError
from swift.devices import cache_room, own_device
from swift.errors import ConfigError, PromptTooLong, RefusedChat, ResourceError, counted, format_seconds
from swift.models.source import locate
from swift.models.trained import take_trained
from swift.rollout.collector import launches_of
from swift.rollout.engines.images import require_images
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.seeds import sample_seed
from swift.startup import collector_resting
from swift.types import Completion, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.models.template import Template
    from swift.rollout.engines.base import InferenceEngine

PROGRESS_S = 10.0
"""Time between two lines about the answered rows of a dataset."""
HELP = "commands: /reset forgets the conversation, /system TEXT sets the system prompt, /exit ends"
HELP_WITH_IMAGES = f"{HELP}; /image PATH shows an image before the next message"


def run(resolved: Resolved) -> int:
    """Run the mode infer; returns the exit code.

    Raises:
        ConfigError: an invalid model, dataset or setting, or a `--result_path` that exists.
        ResourceError: the results cannot be written.
    """
    args: Any = resolved.args
    has_dataset = bool(args.val_dataset or args.dataset)
    if not has_dataset and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(f"NPROC_PER_NODE: {os.environ['WORLD_SIZE']}: a chat runs in one process; unset it")
    if args.infer_backend == "vllm" and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"NPROC_PER_NODE: {os.environ['WORLD_SIZE']}: vLLM runs in one process here; unset it, or give several "
            "engines to `swift rollout --vllm_data_parallel_size`"
        )
    if args.vllm_guided_decoding_regex is not None:
        from swift.rollout.engines.guided import require

        require(args.infer_backend, args.vllm_guided_decoding_regex)
    result_path = new_file(args.result_path, args) if has_dataset else None
    for line in take_trained(args, resolved.given):
        print(f"swift: {line}", file=sys.stderr)
    template, engine = load_engine(args)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    with contextlib.closing(engine):
        if result_path is not None:
            return answer_dataset(args, template, engine, result_path)
        chat = Chat(template, engine, args.sampling_params(), system=_system(args), seed=args.seed)
        return chat.loop(sys.stdin, sys.stdout)


def load_engine(args: Any) -> tuple[Template, InferenceEngine]:
    """The chat template and an engine in this process for the model of the settings, with adapters merged."""
    with collector_resting():
        from swift.models import load_chat, load_for_inference
        from swift.rollout.engines.transformers import TransformersEngine

        template = load_chat(args)
        if args.infer_backend == "vllm":
            if template.vision is not None:
                require_images("vllm", template.vision.model_type)
            return template, build_engine(_vllm_spec(args, template))
        device, ends = own_device(), template.stop_token_ids
        model = load_for_inference(args, device=str(device))
        if template.vision is not None:
            template.vision.attach(model)
        room = cache_room(device)
        engine = TransformersEngine(model, eos_token_ids=ends, tokenizer=template.tokenizer, cache_bytes=room)
    return template, engine


def _vllm_spec(args: Any, template: Template) -> EngineSpec:
    source = locate(args)
    return EngineSpec(
        backend="vllm",
        model=str(source.base),
        adapters=tuple(map(str, source.adapters)),
        dtype=args.torch_dtype,
        eos_token_ids=tuple(template.stop_token_ids),
        max_model_len=args.vllm_max_model_len,
        seed=args.seed,
        devices=(str(own_device()),),
        memory_share=args.vllm_gpu_memory_utilization,
        trust_remote_code=args.trust_remote_code,
        engine_kwargs=dict(args.vllm_engine_kwargs),
        sees=template.vision is not None,
        max_pixels=args.max_pixels,
    )


def answer_dataset(args: Any, template: Template, engine: InferenceEngine, result_path: Path) -> int:
    """Answer every row of the dataset, and write one JSON object per row; returns the exit code."""
    from swift.data.prompts import Tokenizer, load_prompts

    limit = engine.capabilities.max_model_len - 1
    limit = min(args.max_length or limit, limit)
    tokenizer = Tokenizer(template.encode_prompt, limit, args.truncation_strategy, template.vision is not None)
    prompts = load_prompts(args, tokenizer, "val" if args.val_dataset else "train")

    def results(rows: range) -> Iterator[dict[str, Any]]:
        return answers(prompts, rows, engine, template, args.sampling_params(), args.seed)

    return write_results(result_path, len(prompts), results, "answered", prompts.report.lines)


def write_results(
    result_path: Path,
    size: int,
    results: Callable[[range], Iterator[dict[str, Any]]],
    done: str,
    notes: Callable[[], list[str]],
) -> int:
    """Write the results of `size` rows, of which each process computes a part; returns the exit code.

    Args:
        result_path: the file; it gets this name when it is complete.
        size: number of rows.
        results: computes the results of some rows, in their order.
        done: past participle for the summary, such as "answered".
        notes: returns lines about the rows; called after the last row.

    Raises:
        ResourceError: the file cannot be written.
    """
    rank, ranks, wait = _join_processes()
    started = time.monotonic()
    due = started + PROGRESS_S
    parts = [result_path.with_name(f".{result_path.name}.part-{number}") for number in range(ranks)]
    try:
        with parts[rank].open("w", encoding="utf-8") as part:
            for number, result in enumerate(results(range(rank, size, ranks))):
                part.write(json.dumps(result, ensure_ascii=False) + "\n")
                part.flush()
                if rank == 0 and (now := time.monotonic()) >= due:
                    due, row = now + PROGRESS_S, rank + number * ranks + 1
                    print(f"row {row}/{size} | {format_seconds((now - started) / row * (size - row))} left", flush=True)
        wait()
        if rank == 0:
            _merge(parts, result_path)
    except OSError as error:
        raise ResourceError(f"--result_path: {result_path}: cannot be written ({error})") from error
    if rank == 0:
        for note in notes():
            print(note)
        print(f"{counted(size, 'row')} {done} in {time.monotonic() - started:.1f} s: {result_path}")
    return 0


def answers(
    prompts: Sequence[Prompt],
    rows: Iterable[int],
    engine: InferenceEngine,
    template: Template,
    sampling: SamplingParams,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Answer each of `rows`, and yield the results in that order.

    Equal rows of a dataset share a prompt id; the seed also depends on the occurrence, so that their answers differ.

    Yields:
        row, prompt_id, messages (the prompt), response, finish_reason, prompt_tokens, completion_tokens and
        columns (the row's other columns).
    """
    order, launches = list(rows), launches_of(prompts)
    requests = []
    for launch in (launches[row] for row in order):
        seeded = replace(sampling, seed=sample_seed(seed, launch.prompt.prompt_id, launch.launch, 0))
        requests.append(Request(str(launch.index), launch.prompt.token_ids, seeded))
    finished: dict[int, Completion] = {}
    waiting = deque(order)
    for completion in engine.sample(requests):
        finished[int(completion.request_id)] = completion
        while waiting and waiting[0] in finished:
            row = waiting.popleft()
            yield _result(row, prompts[row], finished.pop(row), template)
    assert not waiting, "the engine did not return every request"


def _join_processes() -> tuple[int, int, Callable[[], object]]:
    """The rank of this process, the number of processes, and a barrier."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return 0, 1, lambda: None
    import torch.distributed as dist

    from swift.rendezvous import process_group_place

    if not dist.is_initialized():
        dist.init_process_group("gloo", **process_group_place(1800.0))
    return dist.get_rank(), world_size, dist.barrier


@dataclass
class Chat:
    """A conversation at the terminal.

    Seeds depend on `seed` and on the number of the answer, so that equal inputs give equal conversations.
    """

    template: Template
    engine: InferenceEngine
    sampling: SamplingParams
    system: str | None = None
    seed: int = 42
    history: list[dict[str, Any]] = field(default_factory=list)
    num_turns: int = 0
    images: list[str] = field(default_factory=list)
    """Digests of the images before the next message."""

    def loop(self, source: TextIO, out: TextIO) -> int:
        """Read and handle lines until /exit or the end of input; returns the exit code."""
        if source.isatty():
            print(self.help, file=out)
        while True:
            if source.isatty():
                print("> ", end="", file=out, flush=True)
            try:
                line = source.readline()
            except KeyboardInterrupt:
                print(file=out)
                return 0
            if not line:
                return 0
            text = line.strip()
            if text == "/exit":
                return 0
            if "\ufffd" in text:
                print("not UTF-8 text; type it again", file=out)
            elif text:
                self.handle(text, out)

    def handle(self, text: str, out: TextIO) -> None:
        """Handle a line of the user: a command, or a message to answer."""
        command, _, rest = text.partition(" ")
        if command == "/reset":
            self.history.clear()
            print("conversation forgotten", file=out)
        elif command == "/system":
            self.system = rest.strip() or None
            print(f"system prompt: {self.system or 'none'}", file=out)
        elif command == "/image" and self.template.vision is not None:
            self.show(rest.strip(), out)
        elif text.startswith("/"):
            print(f"{command}: unknown; {self.help}", file=out)
        else:
            self.answer(text, out)

    @property
    def help(self) -> str:
        """The commands."""
        return HELP if self.template.vision is None else HELP_WITH_IMAGES

    def show(self, path: str, out: TextIO) -> None:
        """Put an image before the next message; its path begins in the working folder."""
        try:
            image = read_image(str(Path(path).expanduser().absolute()), ImageSource(folder=Path("/")))
        except RowError as error:
            print(error, file=out)
            return
        remember([image])
        self.images.append(image.digest)
        print(f"image {image.digest} comes before the next message", file=out)

    def answer(self, text: str, out: TextIO) -> None:
        """Print the answer while it is sampled, and add the turn to the history; Ctrl-C ends the answer early."""
        images = [{"type": "image", "image": digest} for digest in self.images]
        content = [*images, {"type": "text", "text": text}] if images else text
        messages = [*self.history, {"role": "user", "content": content}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        seed = sample_seed(self.seed, "chat", self.num_turns, 0)
        self.images = []
        try:
            ids = self.template.encode_prompt([*system, *messages])
        except RefusedChat as error:
            print(error.problems[0], file=out)
            return
        request = Request("chat", ids, replace(self.sampling, seed=seed))
        self.num_turns += 1
        printer = StreamPrinter(self.template, out)

        def show_so_far() -> None:
            if token_ids := self.engine.so_far("chat")[0]:  # empty after the request has ended
                printer.show(token_ids)

        try:
            self.engine.after_step = show_so_far
            for done in self.engine.sample([request]):
                printer.show(done.token_ids)
            reply = printer.finish()
        except KeyboardInterrupt:
            reply = printer.finish()
            print(" [stopped]", end="", file=out)
        except PromptTooLong as error:
            print(f"{error.problems[0]}; /reset starts again", file=out)
            return
        print(file=out, flush=True)
        self.history = [*messages, {"role": "assistant", "content": reply}]


class StreamPrinter:
    """Prints text while its tokens arrive; a character is printed when its bytes are complete."""

    def __init__(self, template: Template, out: TextIO) -> None:
        self.template, self.out = template, out
        self.text = ""
        self._printed = 0

    def show(self, token_ids: Sequence[int]) -> None:
        """Print the new text of the answer. token_ids: all tokens so far."""
        self.text = self.template.decode(token_ids)
        complete = len(self.text.rstrip("\ufffd"))
        self.out.write(self.text[self._printed : complete])
        self.out.flush()
        self._printed = max(self._printed, complete)

    def finish(self) -> str:
        """Print the rest, including incomplete characters; returns the whole text."""
        self.out.write(self.text[self._printed :])
        self._printed = len(self.text)
        return self.text


def _result(row: int, prompt: Prompt, completion: Completion, template: Template) -> dict[str, Any]:
    return {
        "row": row,
        "prompt_id": prompt.prompt_id,
        "messages": with_files(prompt.messages),
        "response": template.decode(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(prompt.token_ids),
        "completion_tokens": len(completion.token_ids),
        "columns": prompt.columns,
    }


def _merge(parts: list[Path], result_path: Path) -> None:
    """Merge the parts of N processes: row r is line r // N of part r % N. A complete file gets its name."""
    merged = result_path.with_name(f".{result_path.name}.merging")
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(merged.open("w", encoding="utf-8"))
        files = itertools.cycle([stack.enter_context(part.open(encoding="utf-8")) for part in parts])
        while line := next(files).readline():
            out.write(line)
    merged.replace(result_path)
    for part in parts:
        part.unlink()


def new_file(given: str | None, args: Any) -> Path:
    """`--result_path`, by default a path with the model's name and the time; creates its folder.

    Raises:
        ConfigError: the file exists.
        ResourceError: the folder cannot be created.
    """
    if given:
        path = Path(given).expanduser().resolve()
    else:
        name = Path(args.model or args.adapters[0]).name
        path = Path("output", "infer", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl").resolve()
    if path.exists():
        raise ConfigError(f"--result_path: {path}: exists; name a new file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"--result_path: {path}: cannot be written ({error})") from error
    return path


def _system(args: Any) -> str | None:
    from swift.data.system import resolve_system

    text, _ = resolve_system(args.system)
    return text
