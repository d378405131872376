"""`gems verify`: the configured run beside one unsplit process."""

from __future__ import annotations

from dataclasses import asdict

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.launch.verification import steps_of
from gems.launch.verification import verify as verify_run
from gems.models import title_of


def verify(spec: RunSpec, options: Options) -> int:
    """Print the largest relative error.

    Exit code 1 if it is too large, or if a rank's bytes are not those predicted.

    Raises:
        RankFailedError: a rank ended before the comparison was done.
    """
    found = verify_run(spec)
    is_wrong = int(not (found.is_equal and found.has_predicted_bytes))
    if options.json:
        print_json(
            {
                "schedule": spec.schedule.name,
                "partitions": spec.parallel.partitions,
                "replicas": spec.parallel.replicas,
                "micro_batches": spec.parallel.micro_batches,
                "model": title_of(spec.model),
                "steps": steps_of(spec.train.precision),
                **asdict(found),
            }
        )
        return is_wrong
    print(
        f"{spec.schedule.name}, {spec.parallel.partitions} partitions x {spec.parallel.replicas}"
        f" replicas: {'equal' if found.is_equal else 'DIFFERENT'}, max relative error"
        f" {found.max_rel_error:.2e} in {found.dtype} ({found.worst})"
    )
    if found.rounding_error:
        print(
            f"the last digit of the images alone changes one process by {found.rounding_error:.2e}"
        )
    held, predicted = (
        " ".join(map(str, sizes))
        for sizes in (found.peak_activation_bytes, found.predicted_activation_bytes or ())
    )
    agreement = f"{'predicted' if found.has_predicted_bytes else 'PREDICTED'} {predicted}"
    if found.peak_activation_bytes == found.predicted_activation_bytes:
        agreement = "as predicted"
    beside = "" if found.predicted_activation_bytes is None else f", {agreement}"
    print(f"activations at most, bytes by rank: {held}{beside}")
    if found.unsplit_layers:
        print(f"full backward at I, because it cannot be split: {', '.join(found.unsplit_layers)}")
    return is_wrong
