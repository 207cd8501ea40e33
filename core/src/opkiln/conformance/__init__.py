"""The conformance kit: does a backend compute what the spec says?

    report = opkiln.conformance.conform("mine")      # also `opkiln conform --backend mine`
    print(report)

Cases are generated from a table of rows for each op; one comparison with the reference in double
precision judges them all. `opkiln.conformance.plugin` makes each case a pytest test.
"""

from opkiln.conformance.cases import Case, cases_of
from opkiln.conformance.checks import Outcome, check
from opkiln.conformance.compare import Comparison, compare
from opkiln.conformance.run import OpReport, Report, conform

__all__ = [
    "Case",
    "Comparison",
    "OpReport",
    "Outcome",
    "Report",
    "cases_of",
    "check",
    "compare",
    "conform",
]
