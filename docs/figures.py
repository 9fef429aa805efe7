"""Draws the figures of the docs: `python docs/figures.py` writes docs/images/*.svg.

    package.svg                who imports whom, from the imports of every file
    prompt-*.svg, weight-*.svg the functions that a prompt or a weight crosses, in order, one figure for each topology
    packing.svg                two groups as padded rows, and as one stream
    memory.svg                 a device over a step, as `swift plan` has it

The tours are written by hand in `TOURS`: the script checks that each function exists, not who calls whom.
`tests/test_architecture.py` compares the files with what this script draws.
"""

from __future__ import annotations

import ast
import functools
import html
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
BASE = ("errors", "types", "flags", "startup", "devices", "elastic", "signals", "rendezvous")
"""Modules that everybody imports: one box."""
STYLE = (
    "text{font:13px sans-serif;fill:#1b1f24}.b{font-weight:600}.s{font-size:11px;fill:#57606a}"
    "rect{fill:#f6f8fa;stroke:#8c959f;rx:6}.lane{fill:#fff;stroke:#d0d7de}.step{fill:#ddf4ff;stroke:#54aeff}"
    ".prompt{fill:#fff8c5;stroke:#d4a72c}"
    "line,path{stroke:#6e7781;fill:none;marker-end:url(#a)}"
)
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}"><style>{style}</style>'
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" style="fill:#6e7781;stroke:none"/></marker></defs>'
    '<rect width="{w}" height="{h}" style="fill:#fff;stroke:none"/>'
)


@dataclass(frozen=True)
class Step:
    """A function on the way. lane: the thread or process that it runs in. at: "path:qualified.name"."""

    lane: str
    at: str


@dataclass(frozen=True)
class Tour:
    """A figure: its title, and the steps in order."""

    title: str
    steps: tuple[Step, ...]

    @property
    def files(self) -> int:
        """How many files the functions are in."""
        return len({step.at.partition(":")[0] for step in self.steps})

    @property
    def functions(self) -> int:
        """How many functions there are."""
        return len({step.at for step in self.steps})


def way(lane: str, *functions: str) -> tuple[Step, ...]:
    """Steps of one lane; "path:a b" stands for two functions of a file."""
    steps: list[Step] = []
    for function in functions:
        path, _, names = function.partition(":")
        steps += [Step(lane, f"{path}:{name}") for name in names.split()]
    return tuple(steps)


TRAINER = "trainer's thread"
LOOP = "rollout loop (*)"
REWARDS = "reward workers' thread"
ACTOR = "engine's process (Ray actor)"
ACTOR_LOOP = "thread of the request queue"
LISTENER = "thread of the client"
SENDER = "thread for each engine"
HTTP = "server's HTTP loop"

DRAWN = way(
    TRAINER,
    "rollout/scheduler.py:RolloutScheduler.launch_batch RolloutScheduler.launch",
    "data/source.py:IndexedPrompts.next",
    "data/prompts.py:PromptDataset.__getitem__",
)
ASKED = way(
    LOOP,
    "rollout/round.py:Round.run Round._sample",
    "rollout/collector.py:RolloutCollector.request",
    "rollout/sources/base.py:EngineSource.generate",
)
SCORED = (
    *way(LOOP, "rollout/round.py:Round._add_part"),
    *way(LOOP, "rewards/pipeline.py:RewardPipeline.submit"),
    *way(REWARDS, "rewards/pipeline.py:RewardPipeline._score RewardPipeline._apply RewardPipeline._call"),
)
TRAINED = way(
    TRAINER,
    "rollout/collector.py:RolloutCollector.finish",
    "rollout/pipeline.py:RolloutPipeline._make_batch",
    "rollout/batches.py:BatchMaker.make BatchMaker.unscored_samples",
    "trainers/grpo/step.py:GlobalBatchStep.run GlobalBatchStep._whole",
    "trainers/token_budget.py:MicroBatchPlanner.plan",
    "trainers/grpo/step.py:GlobalBatchStep._micro_batches",
    "trainers/grpo/micro_batch.py:collate",
    "trainers/grpo/logprobs.py:LogProbs.scores",
    "trainers/grpo/step.py:GlobalBatchStep._loss",
    "rl/objective.py:policy_loss",
)
POOLED = way(
    LOOP,
    "rollout/engines/pool.py:EnginePool.generate EnginePool._engine_for",
    "rollout/engines/choice.py:EngineChoice.__call__",
    "rollout/engines/client.py:EngineClient.generate EngineClient._post_new",
)
QUEUED = way(
    ACTOR_LOOP,
    "rollout/engines/request_queue.py:RequestQueue._dispatch RequestQueue._sample",
    "rollout/engines/stepped.py:SteppedEngine.generate SteppedEngine._make_step SteppedEngine._submit_new",
    "rollout/engines/vllm/engine.py:VLLMEngine.submit VLLMEngine.advance VLLMEngine._take",
    "rollout/engines/running.py:Running.completion",
    "rollout/engines/stepped.py:SteppedEngine._deliver",
    "rollout/engines/completion_stream.py:CompletionStream.put",
)
DELIVERED = way(LOOP, "rollout/engines/client.py:EngineClient._take")

SYNCED = way(
    TRAINER,
    "rollout/pipeline.py:RolloutPipeline._launch_round",
    "rollout/weights/sync.py:WeightSync.update WeightSync.sync WeightSync._send_on_all_ranks",
    "rollout/weights/sync.py:WeightSync._send WeightSync._send_buckets _send_and_check",
    "rollout/weights/policy.py:PolicyWeights.buckets",
)
SENT = (
    *way(TRAINER, "rollout/engines/pool.py:EnginePool.update", "rollout/weights/base.py:WeightStream.__iter__"),
    *way(TRAINER, "rollout/weights/feed.py:Feed.give"),
    *way(SENDER, "rollout/weights/sending.py:send_update _Sending.send"),
)
LOADED = (
    "rollout/engines/states.py:StatefulEngine.update",
    "rollout/engines/vllm/engine.py:VLLMEngine._load",
    "rollout/engines/vllm/worker.py:WorkerExtension.swift_load load_part",
)
CONFIRMED = (
    "rollout/engines/vllm/worker.py:WorkerExtension.swift_end_update",
    "rollout/engines/states.py:StatefulEngine.update",
)

TOURS: dict[str, Tour] = {
    "prompt-in-process": Tour(
        "Life of a prompt: transformers engine in the trainer's process",
        (
            *DRAWN,
            *ASKED,
            *way(
                LOOP,
                "rollout/engines/stepped.py:SteppedEngine.generate SteppedEngine._make_step SteppedEngine._submit_new",
                "rollout/engines/transformers/engine.py:TransformersEngine.submit TransformersEngine.advance",
                "rollout/engines/transformers/batch.py:BatchRun.step BatchRun._add",
                "rollout/engines/running.py:Running.completion",
                "rollout/engines/stepped.py:SteppedEngine._deliver",
            ),
            *SCORED,
            *TRAINED,
        ),
    ),
    "prompt-dedicated": Tour(
        "Life of a prompt: engines on devices of their own",
        (
            *DRAWN,
            *ASKED,
            *POOLED,
            *way(LOOP, "rollout/engines/actor_client.py:ActorClient.post"),
            *way(
                ACTOR,
                "rollout/engines/ray_actor.py:EngineHost.submit",
                "rollout/engines/completion_stream.py:CompletionStream.submit",
                "rollout/engines/request_queue.py:RequestQueue.enqueue",
            ),
            *QUEUED,
            *way(
                ACTOR,
                "rollout/engines/ray_actor.py:EngineHost.take",
                "rollout/engines/completion_stream.py:CompletionStream.take",
            ),
            *way(
                LISTENER,
                "rollout/engines/actor_client.py:ActorClient._listen",
                "rollout/engines/client.py:EngineClient.deliver",
            ),
            *DELIVERED,
            *SCORED,
            *TRAINED,
        ),
    ),
    "prompt-server": Tour(
        "Life of a prompt: engines behind swift rollout",
        (
            *DRAWN,
            *ASKED,
            *POOLED,
            *way(LOOP, "rollout/engines/server_client.py:ServerClient.post"),
            *way(LISTENER, "rollout/engines/server_client.py:ServerClient._read ServerClient._events"),
            *way(HTTP, "rollout/server/infer.py:infer _requests", "rollout/server/service.py:Service.open"),
            *way(
                HTTP,
                "rollout/engines/completion_stream.py:CompletionStream.submit",
                "rollout/engines/request_queue.py:RequestQueue.enqueue",
            ),
            *QUEUED,
            *way(
                HTTP,
                "rollout/server/service.py:Answers.next",
                "rollout/engines/completion_stream.py:CompletionStream.take",
                "rollout/server/infer.py:_lines _line",
            ),
            *way(LISTENER, "rollout/engines/client.py:EngineClient.deliver"),
            *DELIVERED,
            *SCORED,
            *TRAINED,
        ),
    ),
    "weight-in-process": Tour(
        "Life of a weight: vLLM in the trainer's process",
        (
            *SYNCED,
            *way(TRAINER, "rollout/weights/base.py:WeightStream.__iter__", *LOADED, *CONFIRMED),
            *way(TRAINER, "rollout/weights/base.py:WeightStream.check"),
        ),
    ),
    "weight-dedicated": Tour(
        "Life of a weight: engines on devices of their own, by the object store",
        (
            *SYNCED,
            *SENT,
            *way(
                SENDER,
                "rollout/engines/actor_client.py:ActorClient.payload",
                "rollout/weights/object_store.py:put",
                "rollout/engines/actor_client.py:ActorClient.send_bucket",
            ),
            *way(
                ACTOR,
                "rollout/engines/ray_actor.py:EngineHost.bucket",
                "rollout/weights/object_store.py:tensors_of",
                "rollout/engines/queue_updates.py:QueueUpdates.send",
            ),
            *way(ACTOR_LOOP, *LOADED),
            *way(ACTOR, "rollout/engines/ray_actor.py:EngineHost.commit"),
            *way(ACTOR_LOOP, *CONFIRMED),
            *way(SENDER, "rollout/weights/sending.py:send_update"),
            *way(TRAINER, "rollout/engines/pool.py:EnginePool.update", "rollout/weights/base.py:WeightStream.check"),
        ),
    ),
    "weight-server": Tour(
        "Life of a weight: engines behind swift rollout, by a shared disk",
        (
            *SYNCED,
            *SENT,
            *way(
                SENDER,
                "rollout/engines/server_client.py:ServerClient.payload",
                "rollout/weights/disk.py:RunFolder.add",
                "rollout/engines/server_client.py:ServerClient.send_bucket",
            ),
            *way(HTTP, "rollout/server/weights.py:bucket _deliver _named", "rollout/weights/disk.py:read_bucket"),
            *way(HTTP, "rollout/engines/queue_updates.py:QueueUpdates.send"),
            *way(ACTOR_LOOP, *LOADED),
            *way(HTTP, "rollout/server/weights.py:commit"),
            *way(ACTOR_LOOP, *CONFIRMED),
            *way(SENDER, "rollout/weights/sending.py:send_update"),
            *way(TRAINER, "rollout/engines/pool.py:EnginePool.update", "rollout/weights/base.py:WeightStream.check"),
        ),
    ),
}


# --- the code ---------------------------------------------------------------------------------------------------------


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def check_exists(at: str) -> None:
    """Raises LookupError: there is no such function."""
    file, _, name = at.partition(":")
    path = ROOT / "swift" / file
    scope: ast.AST = tree(path) if path.exists() else ast.Module([], [])
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in ast.walk(scope) if isinstance(node, kinds) and node.name == part]
        if not found:
            raise LookupError(f"docs/figures.py: swift/{at}: there is no {part}")
        scope = found[0]


def parts() -> dict[str, str]:
    """The packages of swift, with what their docstrings say of them."""
    found = {}
    for init in sorted((ROOT / "swift").glob("*/__init__.py")):
        docstring = ast.get_docstring(tree(init)) or ""
        found[init.parent.name] = docstring.partition("\n")[0].partition(":")[0].rstrip(".")
    return found


def imports() -> dict[str, set[str]]:
    """Which part imports which, type checks left out; the modules of `BASE` count as "base"."""
    known = {**dict.fromkeys(parts()), **dict.fromkeys(BASE)}
    found: dict[str, set[str]] = {name: set() for name in parts()}
    for path in sorted((ROOT / "swift").rglob("*.py")):
        part = path.relative_to(ROOT / "swift").parts[0].removesuffix(".py")
        if part not in found:
            continue
        for module in runtime_imports(tree(path)):
            names = module.split(".")
            if names[0] == "swift" and len(names) > 1 and names[1] in known and names[1] != part:
                found[part].add("base" if names[1] in BASE else names[1])
    return found


def runtime_imports(module: ast.Module) -> list[str]:
    """Full names of what a file imports, wherever in it; imports for type checkers are left out."""
    skipped = {
        id(inner)
        for node in ast.walk(module)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: list[str] = []
    for node in ast.walk(module):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that a chain of others stands for."""

    def reaches(start: str, goal: str) -> bool:
        return goal in graph.get(start, ()) or any(reaches(part, goal) for part in graph.get(start, ()))

    kept: dict[str, set[str]] = {}
    for name, targets in graph.items():
        kept[name] = {goal for goal in targets if not any(reaches(other, goal) for other in targets - {goal})}
    return kept


# --- the figures ------------------------------------------------------------------------------------------------------


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{style} text-anchor="{anchor}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "") -> str:
    """A rectangle."""
    style = f' class="{kind}"' if kind else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{style}/>'


def draw_package() -> str:
    """The packages in rows: each below all that import it."""
    graph = reduced({name: tos - {"base"} for name, tos in imports().items()})
    purposes = parts()

    @functools.cache
    def depth(name: str) -> int:
        return 1 + max((depth(other) for other in graph if name in graph[other]), default=-1)

    rows: dict[int, list[str]] = {}
    for name in graph:
        rows.setdefault(depth(name), []).append(name)
    width, w, h = 980, 230, 54
    places = {}
    for level, names in rows.items():
        gap = width / len(names)
        for number, name in enumerate(names):
            places[name] = (gap * (number + 0.5) - w / 2, 50 + level * 105)
    height = 60 + (max(rows) + 1) * 105 + 60
    drawn = [text(20, 28, "Packages of swift: an arrow points from a package to one that it imports", "b")]
    for name, tos in graph.items():
        x, y = places[name]
        for to in sorted(tos):
            tx, ty = places[to]
            drawn.append(f'<line x1="{x + w / 2:g}" y1="{y + h:g}" x2="{tx + w / 2:g}" y2="{ty - 2:g}"/>')
    for name, (x, y) in places.items():
        drawn += [box(x, y, w, h), text(x + w / 2, y + 22, f"swift/{name}", "b", "middle")]
        drawn.append(text(x + w / 2, y + 41, shortened(purposes[name], 40), "s", "middle"))
    drawn.append(box(20, height - 62, width - 40, 42))
    drawn.append(text(width / 2, height - 36, f"{', '.join(BASE)}: imported by several of them", "", "middle"))
    return HEAD.format(w=width, h=height, style=STYLE) + "".join(drawn) + "</svg>\n"


def draw_tour(tour: Tour) -> str:
    """One column for each thread or process, one row for each function."""
    lanes = list(dict.fromkeys(step.lane for step in tour.steps))
    w, step_h = 330, 44
    footnote = "(*) the trainer's thread, or one of its own: --async_generate, --streaming_partial_batch" * (
        LOOP in lanes
    )
    width, height = 20 + len(lanes) * (w + 20), 110 + len(tour.steps) * (step_h + 10)
    drawn = [
        text(20, 28, tour.title, "b"),
        text(20, 47, f"{tour.functions} functions in {tour.files} files. {footnote}", "s"),
    ]
    for number, lane in enumerate(lanes):
        x = 20 + number * (w + 20)
        drawn += [box(x, 60, w, height - 80, "lane"), text(x + w / 2, 80, lane, "b", "middle")]
    before: tuple[float, float] | None = None
    for number, step in enumerate(tour.steps):
        x, y = 30 + lanes.index(step.lane) * (w + 20), 92 + number * (step_h + 10)
        file, _, name = step.at.partition(":")
        if before is not None:
            drawn.append(f'<line x1="{before[0]:g}" y1="{before[1]:g}" x2="{x + (w - 20) / 2:g}" y2="{y - 1:g}"/>')
        drawn += [box(x, y, w - 20, step_h, "step"), text(x + 10, y + 19, name, "b"), text(x + 10, y + 36, file, "s")]
        before = (x + (w - 20) / 2, y + step_h)
    return HEAD.format(w=width, h=height, style=STYLE) + "".join(drawn) + "</svg>\n"


GROUPS = ((5, (4, 9, 6, 3)), (7, (5, 2, 8, 4)))
"""Of the figure of packing: tokens of a prompt, and of its completions."""


def draw_packing() -> str:
    """A cell for each token."""
    cell, rows = 22, [(prompt, length) for prompt, lengths in GROUPS for length in lengths]
    longest = max(prompt + length for prompt, length in rows)
    drawn = [text(20, 28, f"Padded rows: {len(rows) * longest} tokens", "b")]

    def cells(x: float, y: float, number: int, kind: str) -> list[str]:
        return [box(x + place * cell, y, cell - 2, cell - 2, kind) for place in range(number)]

    for number, (prompt, length) in enumerate(rows):
        y, end = 42 + number * cell, 20 + (prompt + length) * cell
        drawn += cells(20, y, prompt, "prompt") + cells(20 + prompt * cell, y, length, "step")
        drawn += cells(end, y, longest - prompt - length, "lane")
    x, y = 20.0, 42 + len(rows) * cell + 54
    total = sum(prompt + sum(lengths) for prompt, lengths in GROUPS)
    drawn.append(text(20, y - 12, f"One stream: {total} tokens; a completion sees its prompt and itself", "b"))
    half = 10
    for prompt, lengths in GROUPS:
        for length, kind in ((prompt, "prompt"), *((length, "step") for length in lengths)):
            drawn += [box(x + place * half, y, half - 1, cell - 2, kind) for place in range(length)]
            x += length * half + 4
    y += cell + 20
    for x, (kind, words) in zip(
        (20, 150, 320), (("prompt", "prompt"), ("step", "completion"), ("lane", "padding")), strict=True
    ):
        drawn += [*cells(x, y, 1, kind), text(x + cell + 4, y + 15, words)]
    width = 40 + max(longest * cell, total * half + 4 * (len(rows) + len(GROUPS)))
    return HEAD.format(w=width, h=y + 40, style=STYLE) + "".join(drawn) + "</svg>\n"


PHASES = {
    "start": (0.6, 3.5, 35.8, 0.0),
    "weight sync": (0.6, 10.6, 16.7, 0.0),
    "rollout": (0.6, 10.6, 35.8, 0.0),
    "forward, backward": (0.6, 22.4, 1.5, 1.1),
    "update": (0.6, 14.2, 1.5, 0.7),
}
"""GiB of process, trainer, engine and torch's cache: row C of scaling.md, by `swift plan ... --json true`."""


def draw_memory() -> str:
    """A bar for each phase."""
    names, kinds, scale = ("process", "trainer", "vLLM", "torch's cache"), ("", "step", "prompt", "lane"), 9.0
    drawn = [text(20, 28, "GiB of each of 8 H100 over a step: full tuning of 7B, vLLM in the same processes", "b")]
    for number, (phase, sizes) in enumerate(PHASES.items()):
        x, y = 150.0, 46 + number * 36
        drawn.append(text(140, y + 17, phase, "", "end"))
        for size, kind in zip(sizes, kinds, strict=True):
            drawn += [box(x, y, size * scale, 24, kind)] if size else []
            x += size * scale
        drawn.append(text(x + 6, y + 17, f"{sum(sizes):.1f}", "s"))
    y = 46 + len(PHASES) * 36 + 10
    for number, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        drawn += [box(150 + number * 130, y, 20, 20, kind), text(176 + number * 130, y + 15, name)]
    return HEAD.format(w=720, h=y + 40, style=STYLE) + "".join(drawn) + "</svg>\n"


def shortened(words: str, most: int) -> str:
    """At most so many characters, whole words only."""
    return textwrap.shorten(words, most, placeholder="…")


def draw_all() -> dict[str, str]:
    """Every figure by its file name. Raises LookupError: a tour names a function that is not there."""
    for tour in TOURS.values():
        for step in tour.steps:
            check_exists(step.at)
    own = {"package.svg": draw_package(), "packing.svg": draw_packing(), "memory.svg": draw_memory()}
    return own | {f"{name}.svg": draw_tour(tour) for name, tour in TOURS.items()}


def main() -> None:
    """Write the figures."""
    for name, drawing in draw_all().items():
        (IMAGES / name).write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
