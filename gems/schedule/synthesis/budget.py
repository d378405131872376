"""Budget a search by a fixed amount of work for a time.

A search thus gives the same result on any machine and under any load.
"""

from __future__ import annotations

STEPS_PER_S = 300_000


class Budget:
    """Steps that a search may take; one step is one operation that the list scheduler places.

    `STEPS_PER_S` is what one core of a common server does in pure Python, so that a budget in seconds is roughly kept.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.spent = 0

    @classmethod
    def of_seconds(cls, budget_s: float) -> Budget:
        """Return the steps of so many seconds."""
        return cls(int(budget_s * STEPS_PER_S))

    def spend(self, steps: int) -> bool:
        """Take steps out when they are left, and says whether they were."""
        if self.spent + steps > self.steps:
            return False
        self.spent += steps
        return True

    def share(self, part: float) -> Budget:
        """Return a budget with a part of what is left; what it spends must be returned with `settle`."""
        return Budget(int((self.steps - self.spent) * part))

    def settle(self, other: Budget) -> None:
        """Count what a share has spent."""
        self.spent += other.spent
