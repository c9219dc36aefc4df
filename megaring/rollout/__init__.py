"""A generation worker that changes its attention layout while requests run (SPLASH).

Layouts, footprints, manifests, cost and scheduling need neither torch nor a GPU; see ``layout``, ``shape``,
``footprint``, ``blocks``, ``manifest``, ``cost`` and ``scheduler``. The worker needs torch and megatron: ``runner`` is
one of its ranks, ``driver`` leads them.
"""
