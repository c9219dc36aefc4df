"""BuddyRing: where each sequence of a training step goes. NumPy and Numba only; usable from any data loader."""

from buddyring.placement import CapacityError, Group, Placement
from buddyring.plan import plan
from buddyring.schedulers import SCHEDULERS
from buddyring.shards import Shards

__all__ = ["SCHEDULERS", "CapacityError", "Group", "Placement", "Shards", "plan"]
