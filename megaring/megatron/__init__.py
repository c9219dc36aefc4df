"""Training with Megatron-Core. Import the modules one by one: ``config``, ``checks`` and ``flops`` need no torch."""
