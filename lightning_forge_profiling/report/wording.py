"""Phrases that the reports share, and names from a trace, shortened."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from math import floor, log10
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.diagnosis.machine_rules import MACHINE
from lightning_forge_profiling.diagnosis.ranks import rank_list
from lightning_forge_profiling.diagnosis.rule import in_ms
from lightning_forge_profiling.diagnosis.verdict import order_note
from lightning_forge_profiling.plain_text import LONGEST_KERNEL, plain
from lightning_forge_profiling.report.screen import Text
from lightning_forge_profiling.schema import NOTHING_STANDS_OUT, Analysis, Distribution, Finding, RankSummary

# host activity while the GPU was idle, by `IDLE_CAUSES`
IDLE_WORDS: Final = MappingProxyType(
    {
        "data": "in the data loader",
        "sync": "host waits for the GPU",
        "launch": "in a launch of 0.1 ms or more",
        "allocator": "in cudaMalloc or cudaFree",
        "copy": "in a copy call",
        "python": "in Python between launches",
        "gpu": "next kernel already launched",
    }
)
STACKS_NOTE: Final = "Recorded with stacks, which slow each Python call: functions that make many calls are overstated"

_USERS_SHOWN: Final = 3
_SAME_WORK: Final = 0.001
_MOST_COUNTED_PCT: Final = 90.0
_RARE: Final = 0.1


def used_gpu(rank: RankSummary) -> bool:
    """Whether GPU work was recorded; without it, busy and idle mean nothing."""
    return rank.gpu.busy_ms_per_step > 0


def verdict(analysis: Analysis) -> Text:
    """The verdict's sentences with its name marked, in green if nothing stands out."""
    style = "bold green" if analysis.verdict == NOTHING_STANDS_OUT else "bold yellow"
    name = re.search(re.escape(analysis.verdict), analysis.verdict_text, re.IGNORECASE)
    return Text(analysis.verdict_text, style if name else "", marked=name[0] if name else "")


def slowest_rank(ranks: Sequence[RankSummary]) -> RankSummary:
    """The rank with the longest median step (one odd step moves a mean); one that is cut off only if all are."""
    return max(ranks, key=lambda rank: (not rank.cut_off, rank.step_ms.p50))


def rank_name(rank: RankSummary) -> str:
    """A rank's number, marked where its figures are of a file that is cut off."""
    return f"{rank.rank} (cut off)" if rank.cut_off else str(rank.rank)


def slowest(ranks: Sequence[RankSummary]) -> str:
    """A remark for the number of `slowest_rank`; "" if there is one rank."""
    return ", the slowest by its median" if len(ranks) > 1 else ""


def between(finding: Finding) -> str:
    """The interval of a finding's share in brackets: ` (38 to 47)`; "" if it is unknown."""
    known = finding.low_pct is not None and finding.high_pct is not None
    return f" ({finding.low_pct:.0f} to {finding.high_pct:.0f})" if known else ""


def findings_note(analysis: Analysis) -> str:
    """What to know of the findings' shares; "" if that is nothing, or if no finding is from the trace it is about."""
    about = any(finding.source == "trace" or finding.code in MACHINE for finding in analysis.findings)
    return f"Note: {analysis.findings_note}" if analysis.findings_note and about else ""


def ranks_note(analysis: Analysis) -> str:
    """Where not all ranks are shown: which are, and how all of them spread; "" else."""
    if analysis.all_ranks <= len(analysis.ranks):
        return ""
    words = {"step": "a step takes {}", "busy": "the GPU is busy for {}", "waits": "a rank waits {} for others"}
    said = [words[name].format(_range(times)) for name, times in analysis.spread.items() if name in words and times.max]
    return (
        f"{len(analysis.ranks)} of {analysis.all_ranks:,} ranks are shown: rank 0, those that are named, a typical one "
        f"and the worst. Over all ranks {', '.join(said)}; shares of findings are means over all of them"
    )


def _range(times: Distribution) -> str:
    least, mid, most = map(in_ms, (times.min, times.p50, times.max))
    return most if least == most else f"{least} to {most} (median {mid})"


def findings_remarks(analysis: Analysis) -> Iterator[str]:
    """What to know to read the findings: why they are in this order, and where the tables count otherwise."""
    if order := order_note(analysis.findings):
        yield order
    codes = {finding.code for finding in analysis.findings if finding.source == "trace"}
    if named := sorted(codes & {"allocator-churn", "sync-bound"}):
        yield f"Tables count idle time inside the call alone; {' and '.join(named)}, the whole gap that began in it."
    if "communication-bound" in codes and analysis.rank_waits:
        yield "Tables count waiting for other ranks as communication; communication-bound does not."


def share_of(analysis: Analysis, finding: Finding) -> str:
    """What a finding's share is relative to, and its interval. Shares of a trace are means over the ranks."""
    if finding.of != "step":
        return f"of {finding.whole}"
    if interval := between(finding):
        return f"of the step{interval}"
    averaged = len(analysis.ranks) > 1 and finding.source == "trace" and finding.code != "straggler"
    return "of the step, mean of the ranks" if averaged else "of the step"


def steps_of(rank: RankSummary) -> str:
    """The number of steps, their length and the device."""
    times = rank.step_ms
    steps = "1 step" if rank.steps == 1 else f"{rank.steps} steps"
    spread = f", {times.min:.3f} to {times.max:.3f} ms, median {times.p50:.3f} ms" if rank.steps > 1 else ""
    cut = "; its file is cut off" if rank.cut_off else ""
    if used_gpu(rank):
        return f"{steps}{spread} on {rank.device or 'an unnamed device'}{cut}"
    nothing = ", without GPU work" if rank.cut_off else "; no GPU events in the trace"
    return f"{steps}{spread}{f' on {rank.device}' if rank.device else ''}{cut}{nothing}"


def calls(per_step: float) -> str:
    """How often something happens in a step."""
    return f"{per_step:.{2 if per_step >= _RARE else 4}f}".rstrip("0").rstrip(".")


def linked(rank: RankSummary) -> str:
    """The share of GPU time that can be joined to its launch; "" without GPU work."""
    if not used_gpu(rank):
        return ""
    return f"{100 - rank.unlinked_pct:.1f} % of the GPU time is joined to its launch, {rank.unlinked_pct:.1f} % is not"


def cpu_threads(rank: RankSummary) -> str:
    """Threads that ran operators on the CPU, and the usable cores; "" if a GPU did, or nothing ran."""
    cpu = rank.cpu
    if cpu is None:
        return ""
    ran = f"operators ran on {cpu.operator_threads} thread{'s' if cpu.operator_threads > 1 else ''}"
    inner = "" if cpu.intra_op_threads is None else f"; intra-op threads: {cpu.intra_op_threads}"
    return ran + inner + ("" if cpu.usable_cores is None else f"; usable cores: {cpu.usable_cores}")


def efficiency(rank: RankSummary) -> str:
    """FLOP/s in matrix products and while busy, or why they are unknown; "" for training on the CPU."""
    flops = rank.flops
    if flops is None:
        return "" if rank.cpu is not None else f"FLOPs unknown: {rank.flops_note}"
    if flops.counted_pct < _MOST_COUNTED_PCT:  # what is known of the rest is no rate over the busy time
        without = f" (not of {', '.join(flops.uncounted)})" if flops.uncounted else ""
        speed = f"{_tflops(flops.matmul_tflops)} TFLOP/s in the {flops.counted_pct:.0f} % of matrix products"
        speed += f" whose FLOPs are known{without}"
        if flops.peak_tflops is None or flops.matmul_pct_of_peak is None:
            return f"{speed}, in {flops.dtype}"
        peak = f"the dense {flops.dtype} peak of {flops.peak_tflops:.1f} TFLOP/s"
        return f"{speed}: {flops.matmul_pct_of_peak:.1f} % of {peak}"
    speed = f"{_tflops(flops.matmul_tflops)} TFLOP/s in matrix products, {_tflops(flops.busy_tflops)} while busy"
    if flops.recomputed_pct > 100 * _SAME_WORK:
        speed += f" ({flops.recomputed_pct:.0f} % of the operations recompute activations or are the optimizer's)"
    if flops.peak_tflops is None or flops.matmul_pct_of_peak is None or flops.busy_pct_of_peak is None:
        return f"{speed} ({flops.dtype}; no peak known for {rank.device or 'this device'})"
    return (
        f"{speed}: {flops.matmul_pct_of_peak:.1f} % and {flops.busy_pct_of_peak:.1f} % "
        f"of the dense {flops.dtype} peak of {flops.peak_tflops:.1f} TFLOP/s"
    )


def _tflops(rate: float) -> str:
    return f"{rate:.1f}" if rate >= 10 else digits(rate)  # noqa: PLR2004


def users_functions(rank: RankSummary) -> str:
    """The user's functions that take most of the recorded step; "" without stacks."""
    users = () if rank.python is None else rank.python.users[:_USERS_SHOWN]
    return ", ".join(f"{user.where} {digits(user.own_ms_per_step)} ms" for user in users)


def by_text(messages: Iterable[tuple[int, str]], several: bool) -> Iterator[tuple[str, str]]:
    """Messages about ranks, each text once, after the ranks that it is about."""
    ranks: dict[str, list[int]] = {}
    for rank, text in messages:
        ranks.setdefault(text, []).append(rank)
    for text, said_of in ranks.items():
        yield f"{rank_list(said_of)}: " if several else "", text


def hints(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """The hints, each text once, after the ranks that it is about."""
    return by_text(((hint.rank, hint.text) for hint in analysis.hints), several=len(analysis.ranks) > 1)


def all_warnings(analysis: Analysis) -> list[str]:
    """Warnings of the analysis and of its ranks, each once."""
    warnings = dict.fromkeys(analysis.warnings)
    of_ranks = ((rank.rank, text) for rank in analysis.ranks for text in rank.warnings if text not in warnings)
    return [*warnings, *(where + text for where, text in by_text(of_ranks, several=len(analysis.ranks) > 1))]


_LAMBDA = re.compile(r"\([^()]*\)(?:::\{lambda\([^()]*\)#\d+\}|::operator\(\)\([^()]*\)(?: const)?)+")
_NAMESPACES = re.compile(r"\b(?:\w+::)+")
_RETURN_TYPE = re.compile(r"^(?:void|int|bool|float|double) ")
_CAST = re.compile(r"\([\w:]+(?: [\w:]+)*\)(?=-?\d)")  # as in (int)4
_CONSTANT = re.compile(r"\b(?:C<|constant<int, )(-?\d+)>")  # CuTe's, as its shapes: tuple<C<128>, C<64>>
_SHAPE = re.compile(r"\btuple<(\d+(?:, ?\d+)+)>")


def short_kernel_name(name: str, width: int = LONGEST_KERNEL) -> str:
    """A kernel's short name: without return type, namespaces and arguments, its template kept.

    The template names what an elementwise or reduction kernel computes, so a long name is cut at its end.
    """
    name = plain(name)[:LONGEST_KERNEL]
    bare = _RETURN_TYPE.sub("", name).replace("(anonymous namespace)::", "")
    bare = _LAMBDA.sub("", _without_arguments(bare))
    bare = _CONSTANT.sub(r"\1", _CAST.sub("", _NAMESPACES.sub("", bare)).replace(" >", ">"))
    return short(_SHAPE.sub(lambda shape: re.sub(", ?", "x", shape[1]), bare) or name, width)


def short(text: str, width: int) -> str:
    """Plain text of at most `width` characters, an ellipsis for what is cut off; a number in it is cut off whole."""
    text = plain(text)
    if len(text) <= width:
        return text
    kept, lost = text[: max(0, width - 1)], text[max(0, width - 1) :]
    return (kept.rstrip("0123456789") if lost[0].isalnum() else kept).rstrip() + "…"


def _without_arguments(name: str) -> str:
    """The name without its argument list; parentheses after a space are a remark, as in a copy's name."""
    if not name.endswith(")"):
        return name
    depth = 0
    for position in range(len(name) - 1, 0, -1):
        depth += {")": 1, "(": -1}.get(name[position], 0)
        if depth == 0:
            return name if name[position - 1] == " " else name[:position]
    return name


def digits(rate: float) -> str:
    """At least three digits of a rate, never an exponent."""
    return f"{rate:,.{max(0, 2 - floor(log10(rate)))}f}" if rate > 0 else "0"


_TOKEN: Final = re.compile(r"[^\W_]+|.", re.DOTALL)
_RETURN_TYPE_OR_NAMESPACE: Final = re.compile(r"^void |\(anonymous namespace\)::|\b(?:\w+::)+")
_TAIL: Final = 2 / 3  # the share of a label for the part that differs; the rest is the beginning of the name
_ROUNDS: Final = 3  # a label that separates two names may equal that of a third; then those two are separated
_FILLERS: Final = 2  # this many equal tokens between two that differ are shown: they take no more room than an ellipsis
_Shorten = Callable[[str, int], str]


def kernel_labels(names: Sequence[str], width: int) -> dict[str, str]:
    """Short names of kernels; those that would read alike show what they differ in."""
    return _labels(names, width, short_kernel_name)


def operator_labels(names: Sequence[str], width: int) -> dict[str, str]:
    """Names of operators, long ones without their middle; those that would read alike show what they differ in."""
    return _labels(names, width, _without_middle)


def _labels(names: Sequence[str], width: int, shorten: _Shorten) -> dict[str, str]:
    labels = {name: shorten(name, width) for name in names}
    for _ in range(_ROUNDS):
        for alike in _alike(labels):
            labels.update(_apart(alike, width, shorten))
    taken: Counter[str] = Counter()
    for name, label in labels.items():  # names that differ in what is never shown, or too far behind
        taken[label] += 1
        if taken[label] > 1:
            number = f" #{taken[label]}"
            labels[name] = short(label, width - len(number)) + number
    return labels


def _alike(labels: Mapping[str, str]) -> list[list[str]]:
    sharing = defaultdict(list)
    for name, label in labels.items():
        sharing[label].append(name)
    return [names for names in sharing.values() if len(names) > 1]


def _apart(names: Sequence[str], width: int, shorten: _Shorten) -> dict[str, str]:
    """Labels that show the tokens in which these names differ."""
    texts: list[str] = []
    for form in (shorten, _with_arguments, short):
        texts = [form(name, LONGEST_KERNEL) for name in names]
        if len(set(texts)) == len(texts):
            break
    tokens = [_TOKEN.findall(text) for text in texts]
    differs = _differing(tokens)
    labels = {name: _label(own, differs, width) for name, own in zip(names, tokens, strict=True)}
    for alike in _alike(labels):
        if len(alike) < len(names):
            labels.update(_apart(alike, width, shorten))
    return labels


def _with_arguments(name: str, width: int) -> str:
    """A kernel's name without namespaces, but with the arguments and lambda numbers that `short_kernel_name` drops."""
    return _RETURN_TYPE_OR_NAMESPACE.sub("", short(name, width))


def _without_middle(name: str, width: int) -> str:
    """An operator's name. The end of a long one matters: the function whose backward autograd runs."""
    name = short(name, LONGEST_KERNEL)
    head = width // 3
    return name if len(name) <= width else f"{name[:head]}…{name[head + 1 - width :]}"


def _differing(tokens: Sequence[Sequence[str]]) -> list[bool]:
    """For each token, whether the names differ there; for different lengths, everything between the equal ends does."""
    differs = [len(set(column)) > 1 for column in zip_longest(*tokens)]
    if len({len(own) for own in tokens}) == 1 or True not in differs:
        return differs
    first = differs.index(True)
    columns = zip(*(reversed(own[first:]) for own in tokens), strict=False)
    same_end = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return [False] * first + [True] * (len(differs) - first - same_end)


def _label(tokens: Sequence[str], differs: Sequence[bool], width: int) -> str:
    positions = [position for position in range(len(tokens)) if position < len(differs) and differs[position]]
    if not positions:
        return short("".join(tokens), width)
    tail, before = "", positions[0] - 1
    for position in positions:
        between = tokens[before + 1 : position]
        tail += ("".join(between) if len(between) <= _FILLERS else "…") + tokens[position]
        before = position
    head, rest = "".join(tokens[: positions[0]]), "…" if positions[-1] + 1 < len(tokens) else ""
    tail = short(tail + rest, max(int(_TAIL * width), width - len(head)))
    room = width - len(tail)
    if len(head) > room:
        kept = ""
        for token in tokens:
            if len(kept + token) >= room:
                break
            kept += token
        head = f"{kept.rstrip()}…"
    return head + tail
