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
        RankFailedError: A rank ended before the comparison was done.
    """
    verification = verify_run(spec)
    is_wrong = int(not (verification.is_equal and verification.has_predicted_bytes))
    if options.json:
        print_json(
            {
                "schedule": spec.schedule.name,
                "partitions": spec.parallel.partitions,
                "replicas": spec.parallel.replicas,
                "micro_batches": spec.parallel.micro_batches,
                "model": title_of(spec.model),
                "steps": steps_of(spec.train.precision),
                **asdict(verification),
            }
        )
        return is_wrong
    print(
        f"{spec.schedule.name}, {spec.parallel.partitions} partitions x {spec.parallel.replicas}"
        f" replicas: {'equal' if verification.is_equal else 'DIFFERENT'}, max relative error"
        f" {verification.max_rel_error:.2e} in {verification.dtype} ({verification.worst})"
    )
    if verification.rounding_error:
        print(
            f"the last digit of the images alone changes one process by {verification.rounding_error:.2e}"
        )
    peaks, predicted = (
        " ".join(map(str, sizes))
        for sizes in (
            verification.peak_activation_bytes,
            verification.predicted_activation_bytes or (),
        )
    )
    agreement = f"{'predicted' if verification.has_predicted_bytes else 'PREDICTED'} {predicted}"
    if verification.peak_activation_bytes == verification.predicted_activation_bytes:
        agreement = "as predicted"
    beside = "" if verification.predicted_activation_bytes is None else f", {agreement}"
    print(f"activations at most, bytes by rank: {peaks}{beside}")
    if verification.unsplit_layers:
        print(
            f"full backward at I, because it cannot be split: {', '.join(verification.unsplit_layers)}"
        )
    return is_wrong
