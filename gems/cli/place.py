"""`gems place`: place the operators of the configured model on devices, with the gain."""

from __future__ import annotations

from typing import Any

import numpy as np

from gems.cli.answers import draw, picture_path
from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.models import title_of
from gems.partition.dlplacer.place import OperatorPlacement
from gems.partition.dlplacer.subgraphs import closed_form_s
from gems.partition.operator_placement import place_operators
from gems.profile.subject import Subject
from gems.utils.tables import table
from gems.utils.units import MIB, format_size

MAX_DEVICES = 64
# Pal et al. 2019 (arXiv 1907.13257), DGX-1 with V100: recalled, not read again from the paper.
PUBLISHED = {("inception_v3", 2): 1.32}
COLUMNS = {
    "operator": "",
    "device": "d",
    "F from [ms]": ".3f",
    "F takes [ms]": ".3f",
    "B from [ms]": ".3f",
    "B takes [ms]": ".3f",
    "holds [MiB]": ".1f",
}


def show_dlplacer(spec: RunSpec, options: Options) -> int:
    """Print a resolved run's placement on --devices.

    A row an operator, the speed-up over one device, bound and gap.
    """
    num_devices = options.whole("--devices", 2, most=MAX_DEVICES)
    picture = picture_path(options)
    subject = Subject.of(spec)
    method = options.chosen.get("--method", "auto")
    placement = place_operators(subject, num_devices, spec.partition.budget_s, spec.seed, method)
    answer = _answer(subject, placement)
    if picture is not None:
        answer["picture"] = draw("placement", answer, picture)
    if options.json:
        print_json(answer)
    else:
        print(_table(answer))
    return 0


def _answer(subject: Subject, found: OperatorPlacement) -> dict[str, Any]:
    graph = found.graph
    timed = found.timed
    devices = found.devices
    one_s = graph.time_s
    cut = [(u, timed.places[v]) for u, v in graph.edges if timed.places[u] != timed.places[v]]
    sent = [u for u, _ in (*cut, *{*cut})]  # a gradient for each edge, an output for each device
    closed_s = closed_form_s(graph, devices.num)
    return {
        "source": "predicted",
        "model": title_of(subject.model),
        **subject.data.sides,
        "micro_batch_size": subject.parallel.micro_batch_size,
        "dtype": subject.train.layer_dtype,
        "machine": subject.machine.name,
        "devices": devices.num,
        "link_latency_s": devices.latency_s,
        "link_bytes_per_s": 1 / devices.s_per_byte if devices.s_per_byte else None,
        "limit_bytes": devices.limit_bytes,
        "contention": devices.has_contention,
        "operators": graph.num_ops,
        "pieces": found.num_pieces,
        "method": found.method,
        "step_s": timed.span_s,
        "one_device_s": one_s,
        "speed_up": found.speed_up,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "optimal": found.is_optimal,
        "solve_s": found.solve_s,
        "closed_form_speed_up": one_s / closed_s if closed_s else 1.0,
        "published_speed_up": PUBLISHED.get((subject.model.name, devices.num)),
        "published_is": "recalled, not confirmed",
        "moved_bytes": sum(graph.ops[u].output_bytes for u in sent),
        "messages": len(sent),
        "held_bytes": devices.held(graph, timed.places),
        "busy_s": np.bincount(timed.places, [op.time_s for op in graph.ops], devices.num).tolist(),
        "placement": [
            {
                "operator": op.name,
                "device": place,
                "forward_start_s": forward,
                "forward_s": op.forward_s,
                "backward_start_s": backward,
                "backward_s": op.backward_s,
                "held_bytes": op.held_bytes,
            }
            for op, place, forward, backward in zip(
                graph.ops, timed.places, timed.forward_start_s, timed.backward_start_s, strict=True
            )
        ],
    }


def _table(answer: dict[str, Any]) -> str:
    rate = answer["link_bytes_per_s"]
    links = "links that take no time (machine.link_bytes_per_s is not given)"
    if rate is not None:
        links = f"links of {rate / 1e9:g} GB/s and {answer['link_latency_s'] * 1e6:g} us"
    head = (
        f"{answer['model']} at {format_size(answer)} px, micro-batch"
        f" {answer['micro_batch_size']}, {answer['operators']} operators in {answer['pieces']}"
        f" pieces on {answer['devices']} x {answer['machine']}, {links}: predicted"
    )
    rows = [
        (
            row["operator"],
            row["device"],
            row["forward_start_s"] * 1e3,
            row["forward_s"] * 1e3,
            row["backward_start_s"] * 1e3,
            row["backward_s"] * 1e3,
            row["held_bytes"] / MIB,
        )
        for row in answer["placement"]
    ]
    busy = " ".join(f"{1e3 * busy_s:.2f}" for busy_s in answer["busy_s"])
    memory_mib = " ".join(f"{held_bytes / MIB:.0f}" for held_bytes in answer["held_bytes"])
    proof = (
        "optimal"
        if answer["optimal"]
        else f"at most {100 * answer['gap']:.2f} % above the shortest"
    )
    lines = [
        table(COLUMNS, rows, title=head),
        (
            f"busy ms a device {busy}, holds MiB {memory_mib}, {answer['messages']} messages of "
            f"{answer['moved_bytes'] / MIB:.1f} MiB in all"
        ),
        (
            f"step {answer['step_s'] * 1e3:.3f} ms, one device {answer['one_device_s'] * 1e3:.3f}"
            f" ms: speed-up {answer['speed_up']:.3f} (min of devices and work over critical path:"
            f" {answer['closed_form_speed_up']:.3f})"
        ),
        (
            f"{proof}: bound {answer['bound_s'] * 1e3:.3f} ms, by {answer['method']} in"
            f" {answer['solve_s']:.1f} s"
        ),
    ]
    if answer["pieces"] == answer["operators"]:
        lines.append("a chain without branches: more devices gain nothing")
    if answer["published_speed_up"] is not None:
        lines.append(
            f"published speed-up {answer['published_speed_up']} ({answer['published_is']})"
        )
    return "\n".join(lines)
