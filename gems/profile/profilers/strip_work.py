"""The share of each layer's work in each strip, by the rows of its operations and their products.

As a child process, it reads a resolved run as JSON on stdin, and prints the work of its layers.
"""

from __future__ import annotations

import sys

from gems.models import layers_of
from gems.models.mixed import Precision
from gems.models.streaming_errors import until_in
from gems.profile.profilers.fake import fake_lab
from gems.profile.profilers.layers import answer
from gems.profile.profilers.strips import images, streaming_stage
from gems.profile.strip_profile import LayerWork, StripWork
from gems.profile.subject import Subject


def take(subject: Subject) -> StripWork:
    """Return the work of the layers of a resolved run by strip.

    Raises:
        ConfigError: A layer needs the whole image.
    """
    precision = Precision.of(subject.train.layer_dtype)
    layers = layers_of(subject.model, subject.data)
    names = [layer.name for layer in layers]
    until = subject.parallel.strips_until
    _, form = streaming_stage(
        subject,
        layers,
        (images(subject, precision),),
        fake_lab(subject.machine, precision),
        until_in(names, names, until),
    )
    work_by_name = {name: [0] * form.strips for name in names}
    largest = dict.fromkeys(names, (0, 1))
    for module, at_once, products in form.work():
        name = next(
            (name for name in names if module == name or module.startswith(f"{name}.")), None
        )
        if name is not None:
            work_by_name[name] = [
                sum(both) for both in zip(work_by_name[name], products, strict=True)
            ]
            largest[name] = max(largest[name], (sum(products), at_once))
    for name in names:
        if until_in([name], names, until) == "":  # all of the map, in the last strip
            work_by_name[name] = [*[0] * (form.strips - 1), 1]
            largest[name] = (1, form.strips)
    even = (1 / form.strips,) * form.strips
    return StripWork(
        tuple(
            LayerWork(
                largest[name][1], tuple(share / sum(work) for share in work) if any(work) else even
            )
            for name, work in work_by_name.items()
        )
    )


if __name__ == "__main__":
    sys.exit(answer(take))
