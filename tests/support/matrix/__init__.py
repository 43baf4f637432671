"""The matrix of combinations: every public op × dtype × options × transformation × batch × sharding × size.

One declaration per op says what may be combined (``matrix.py`` in the family's test folder, built from
:mod:`support.matrix.calls`). :mod:`support.matrix.generator` draws cases that cover every pair of values for each op.
:mod:`support.matrix.run` runs a case and compares it, element by element, with an independent reference in plain JAX in
float64. :mod:`support.matrix.fuzz` draws random cases without end.

A failing case prints itself as Python code, for example

    from support.matrix.generator import Case
    from support.matrix.run import check
    check(Case(op='segment_max', dtype='float32', size='small', transformation='vjp', batch='none', sharding='single',
               implementation='kernel', options=(), seed=0))

and runs with ``PYTHONPATH=tests``. Results and scratch memory are filled with 0xFF before every kernel, so that missing
writes show.
"""

import os

os.environ.setdefault("JAX_BARACUDA_POISON", "1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
