"""A plan as text for people and as one JSON object."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from buddyring.table import format_table
from megaring.rollout.planning import GIB, Plan, SwitchPlan
from megaring.rollout.shape import ModelShape

MIB = 2**20

_LEGEND = (
    "TP   projections and KV split by head; the KV of MLA has one head, so every rank has all of it",
    "DP   whole projections on every rank; each request's KV whole on the rank that owns it",
    "CP   whole projections on every rank; each request's KV split by position, page by page",
    "DOP  projections split by head as in TP; each request's KV whole on its owner as in DP",
)
_PRIMITIVES = {"keep": "keep", "discard": "discard", "all_gather": "all-gather", "all_to_all": "all-to-all"}


def report_lines(plan: Plan, rates: bool = False) -> list[str]:
    """The plan as text: memory, step time and switches, a table each. ``rates`` adds the machine's constants."""
    lines = [*_heading(plan), "", *_memory(plan), "", *_times(plan), "", *_switches(plan), "", *_LEGEND]
    rest = plan.question.calibration
    if rates:
        return [*lines, "", *rest.lines()]
    return [*lines, "", f"Times are predicted from rates of: {rest.machine}, {rest.origin}. --rates shows them."]


def to_json(plan: Plan) -> str:
    """The plan as one JSON object; sizes in bytes, times in seconds."""
    question, constants = plan.question, plan.question.calibration
    made = {
        "model": question.shape.name,
        "layers": question.shape.layers,
        "ranks": question.ranks,
        "requests": question.requests,
        "context_tokens": question.context,
        "chunk_tokens": question.chunk,
        "usable_bytes": question.usable,
        "reserve_bytes": question.reserve,
        "common_bytes": plan.common,
        "kv_bytes_per_token": question.shape.token_bytes,
        "calibration": asdict(constants),
        "fastest": plan.fastest,
        "layouts": {
            name: {
                "projection_bytes": each.weights,
                "kv_bytes": each.kv,
                "fits": not each.misfit,
                "misfit": each.misfit,
                "longest_context_tokens": each.longest_context,
                "admitted_requests": each.admitted.total,
                "admitted_per_owner": each.admitted.each,
                "step_seconds": each.stages.seconds,
                "stages": asdict(each.stages),
            }
            for name, each in plan.layouts.items()
        },
        "switches": [_switch_fields(each) for each in plan.switches],
    }
    return json.dumps(made, indent=1)


def _switch_fields(switch: SwitchPlan) -> dict[str, Any]:
    way = switch.passage
    manifest = way.manifest
    everyone = range(manifest.ranks)
    return {
        "from": manifest.source.name,
        "to": manifest.destination.name,
        "weights": manifest.weights,
        "kv": manifest.kv,
        "received_weight_bytes_per_rank_and_layer": max(map(manifest.received_weight_bytes, everyone)),
        "received_kv_bytes_per_rank_and_layer": max(map(manifest.received_kv_bytes, everyone)),
        "total_bytes": manifest.total_bytes,
        "transit_bytes": max(map(manifest.transit_bytes, everyone)),
        "layer_transfer_seconds": way.transfer,
        "exposed_seconds": way.exposed,
        "blocking_seconds": way.blocking,
        "repaid_after_steps": switch.repaid,
        "obstacle": switch.obstacle,
    }


def _heading(plan: Plan) -> list[str]:
    question, shape = plan.question, plan.question.shape
    step = f"{question.requests} requests of {question.context:,} cached tokens, each decoding one more"
    if question.chunk:
        step = (
            f"{question.requests} requests of {question.context:,} cached tokens: one prefills {question.chunk:,} more"
        )
        step += ", the others decode one each" if question.requests > 1 else ""
    note = []
    if shape.feed_forward is None or not shape.feed_forward.vocab:
        note = ["The vocabulary size is not known: embedding and output layer are not counted."]
    scale, unit = _unit(shape.projection_bytes)
    return [
        f"{shape.name}: {_attention(shape)}, {shape.layers} layers, on {question.ranks} ranks",
        step,
        f"A token's KV is {shape.token_bytes / 1024:,.1f} KiB over all layers; the projections that layouts place are "
        f"{shape.projection_bytes / scale:,.2f} {unit}.",
        *note,
    ]


def _unit(largest: float) -> tuple[int, str]:
    """The unit that sizes up to ``largest`` bytes are shown in: GiB, or MiB below a tenth of one."""
    return (GIB, "GiB") if largest >= GIB / 10 else (MIB, "MiB")


def _attention(shape: ModelShape) -> str:
    widths = f"{8 * shape.weight_bytes}-bit weights, {8 * shape.kv_bytes}-bit KV"
    if shape.mla is not None:
        return (
            f"MLA with {shape.query_heads} heads and a latent of {shape.mla.kv_lora_rank}+{shape.mla.qk_rope}, {widths}"
        )
    return f"GQA with {shape.query_heads} query and {shape.kv_heads} KV heads, {widths}"


def _memory(plan: Plan) -> list[str]:
    question = plan.question
    room = question.usable - question.reserve - plan.common
    scale, unit = _unit(max(each.weights + each.kv for each in plan.layouts.values()))
    rows = [
        [
            name,
            f"{each.weights / scale:,.2f}",
            f"{each.kv / scale:,.2f}",
            "none" if each.misfit else f"{(room - each.weights - each.kv) / scale:,.2f}",
            f"{each.longest_context:,}",
            f"{each.admitted.total:,}",
            f"{each.admitted.each:,} an owner" if each.admitted.total != each.admitted.each else "",
        ]
        for name, each in plan.layouts.items()
    ]
    first = f"memory of\na rank, {unit}"
    header = (first, "projec-\ntions", "\nKV", "room\nleft", "longest\ncontext", "requests\nadmitted", "")
    return [
        f"A rank has {question.usable / GIB:.1f} GiB usable: {plan.common / GIB:.1f} of weights outside attention, "
        f"{question.reserve / GIB:.1f} reserve, {room / GIB:.1f} for the layouts.",
        *format_table(header, rows),
        f"longest context: of a batch of {question.requests}; requests admitted: of {question.context:,} tokens each",
        *(f"{name} does not fit: {each.misfit}" for name, each in plan.layouts.items() if each.misfit),
    ]


def _times(plan: Plan) -> list[str]:
    rows = []
    for name, each in plan.layouts.items():
        stages = each.stages
        exposed = stages.seconds - stages.fixed - stages.projection - stages.attention
        parts = (stages.fixed, stages.projection, stages.attention, exposed, stages.seconds)
        note = "does not fit" if each.misfit else "fastest" if name == plan.fastest else ""
        rows.append([name, *(f"{1e3 * part:,.2f}" for part in parts), note])
    header = (
        "time of a\nstep, ms",
        "rest of\nmodel",
        "projec-\ntions",
        "atten-\ntion",
        "commu-\nnication",
        "\nstep",
        "",
    )
    return format_table(header, rows)


def _switches(plan: Plan) -> list[str]:
    rows = []
    scale, unit = _unit(max(each.passage.manifest.total_bytes for each in plan.switches))
    for each in plan.switches:
        way = each.passage
        manifest = way.manifest
        received = max(map(manifest.received_bytes, range(manifest.ranks)))
        rows.append(
            [
                f"{manifest.source} -> {manifest.destination}",
                _PRIMITIVES[manifest.weights],
                _PRIMITIVES[manifest.kv],
                f"{received / MIB:,.2f}" if received else "-",
                f"{manifest.total_bytes / scale:,.2f}" if received else "-",
                f"{1e3 * way.transfer:,.2f}",
                f"{1e3 * way.exposed:,.2f}",
                f"{1e3 * way.blocking:,.2f}",
                _repaid(each),
            ]
        )
    header = (
        "switch",
        "weights",
        "KV",
        "MiB a rank\nand layer",
        f"{unit} in\nall",
        "ms a\nlayer",
        "exposed\nms",
        "blocking\nms",
        "repaid\nafter",
    )
    return [
        *format_table(header, rows),
        "exposed: by how much the switching step is longer; blocking: the same if nothing overlapped; repaid: steps in",
        "the new layout that earn it back, or slower where a step there takes no less time",
    ]


def _repaid(switch: SwitchPlan) -> str:
    if switch.obstacle:
        return "no room"
    if switch.repaid is None:
        return "slower"
    if switch.repaid == 0:
        return "at once"
    steps = math.ceil(switch.repaid)
    return f"{steps:,.0f} step{'s' if steps > 1 else ''}"
