"""`gems place`: on which devices the operators of the configured model run, and what that gains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.cli.pictures import check_picture, draw
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.models import title_of
from gems.partition.dlplacer.place import Placement
from gems.partition.dlplacer.subgraphs import closed_form_s
from gems.partition.operator_placement import placement_of
from gems.simulation.costs import network_in_seconds
from gems.utils.units import MIB

MAX_DEVICES = 64
# Pal et al. 2019 (arXiv 1907.13257), DGX-1 with V100: recalled, not read again from the paper.
PUBLISHED = {("inception_v3", 2): 1.32}


def show_dlplacer(spec: RunSpec, options: Options) -> int:
    """Print a resolved run's placement on --devices: a row an operator, the speed-up over one device, bound and gap."""
    num_devices = _devices(options.chosen.get("--devices", "2"))
    picture = options.chosen.get("--picture")
    if picture is not None:
        check_picture(Path(picture))
    found = placement_of(spec, num_devices, network_in_seconds(spec), options.chosen.get("--method", "auto"))
    answer = _answer(spec, found)
    if picture is not None:
        answer["picture"] = draw("placement", answer, Path(picture))
    if options.json:
        print_json(answer)
    else:
        print("\n".join(_table(answer)))
    return 0


def _devices(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= MAX_DEVICES:
        raise ConfigError("--devices", word, f"must be a whole number from 1 to {MAX_DEVICES}")
    return int(word)


def _answer(spec: RunSpec, found: Placement) -> dict[str, Any]:
    graph, timed, devices = found.graph, found.timed, found.devices
    one_s = graph.time_s
    gradients = [u for u, v in graph.edges if timed.places[u] != timed.places[v]]
    outputs = [u for u, _ in {(u, timed.places[v]) for u, v in graph.edges if timed.places[u] != timed.places[v]}]
    closed_s = closed_form_s(graph, devices.num)
    return {
        "source": "predicted", "model": title_of(spec.model), "height_px": spec.data.height_px,
        "width_px": spec.data.width_px, "micro_batch_size": spec.parallel.micro_batch_size,
        "dtype": spec.train.dtype, "machine": spec.machine.name, "devices": devices.num,
        "link_latency_s": devices.latency_s, "link_bytes_per_s": 1 / devices.s_per_byte if devices.s_per_byte else None,
        "limit_bytes": devices.limit_bytes, "contention": devices.has_contention, "operators": graph.num_ops,
        "pieces": found.num_pieces,
        "method": found.method, "step_s": timed.span_s, "one_device_s": one_s, "speed_up": found.speed_up,
        "bound_s": found.bound_s, "gap": found.gap, "optimal": found.is_optimal, "solve_s": found.solve_s,
        "closed_form_speed_up": one_s / closed_s if closed_s else 1.0,
        "published_speed_up": PUBLISHED.get((spec.model.name, devices.num)), "published_is": "recalled, not confirmed",
        "moved_bytes": sum(graph.ops[u].output_bytes for u in (*outputs, *gradients)),
        "messages": len(outputs) + len(gradients),
        "held_bytes": devices.held(graph, timed.places),
        "busy_s": [
            sum(op.time_s for op, place in zip(graph.ops, timed.places, strict=True) if place == device)
            for device in range(devices.num)
        ],
        "placement": [
            {"operator": op.name, "device": place, "forward_start_s": forward, "forward_s": op.forward_s,
             "backward_start_s": backward, "backward_s": op.backward_s, "held_bytes": op.held_bytes}
            for op, place, forward, backward in zip(
                graph.ops, timed.places, timed.forward_start_s, timed.backward_start_s, strict=True
            )
        ],
    }  # fmt: skip


def _table(answer: dict[str, Any]) -> Sequence[str]:
    rate = answer["link_bytes_per_s"]
    links = "links that take no time (machine.link_bytes_per_s is not given)"
    if rate is not None:
        links = f"links of {rate / 1e9:g} GB/s and {answer['link_latency_s'] * 1e6:g} us"
    width = max(8, *(len(row["operator"]) for row in answer["placement"]))
    lines = [
        f"{answer['model']} at {answer['height_px']}x{answer['width_px']} px, "
        f"micro-batch {answer['micro_batch_size']}, {answer['operators']} operators in {answer['pieces']} pieces "
        f"on {answer['devices']} x {answer['machine']}, {links}: predicted",
        f"{'operator':<{width}}{'device':>7}{'F from ms':>11}{'takes':>9}"
        f"{'B from ms':>11}{'takes':>9}{'holds MiB':>11}",
    ]
    for row in answer["placement"]:
        lines.append(
            f"{row['operator']:<{width}}{row['device']:>7}{row['forward_start_s'] * 1e3:>11.3f}"
            f"{row['forward_s'] * 1e3:>9.3f}{row['backward_start_s'] * 1e3:>11.3f}"
            f"{row['backward_s'] * 1e3:>9.3f}{row['held_bytes'] / MIB:>11.1f}"
        )
    proof = "optimal" if answer["optimal"] else f"at most {100 * answer['gap']:.2f} % above the shortest"
    lines += [
        "busy ms a device " + " ".join(f"{1e3 * busy:.2f}" for busy in answer["busy_s"])
        + ", holds MiB " + " ".join(f"{held / MIB:.0f}" for held in answer["held_bytes"])
        + f", {answer['messages']} messages of {answer['moved_bytes'] / MIB:.1f} MiB in all",
        f"step {answer['step_s'] * 1e3:.3f} ms, one device {answer['one_device_s'] * 1e3:.3f} ms: "
        f"speed-up {answer['speed_up']:.3f} "
        f"(min of devices and work over critical path: {answer['closed_form_speed_up']:.3f})",
        f"{proof}: bound {answer['bound_s'] * 1e3:.3f} ms, by {answer['method']} in {answer['solve_s']:.1f} s",
    ]  # fmt: skip
    if answer["pieces"] == answer["operators"]:
        lines.append("a chain without branches: more devices gain nothing")
    if answer["published_speed_up"] is not None:
        lines.append(f"published speed-up {answer['published_speed_up']} ({answer['published_is']})")
    return lines
