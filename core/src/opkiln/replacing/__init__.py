"""opkiln.replace: the modules of a model, computed by opkiln.functional.

    plan = opkiln.replace(model, example=x)
    print(plan)
    plan.apply()
    plan.revert()

match.py says how a module can be served (torch.nn's by their class; rms.py: RMSNorm classes by what
they compute), served.py is the class that a served module gets, gain.py what that is worth.
"""

from opkiln.replacing.plan import Plan, Row, replace

__all__ = ["Plan", "Row", "replace"]
