"""Prompts of common English words in random order, as in most load tests."""

import random

COMMON_WORDS = """
about after again air all along also always animal another answer any around ask away back because
been before began below best better between big book both boy call came can car carry change
children city close come could country cut day different does done door down each early earth eat
end enough even every example eye face family far father feet few find first follow food form found
four friend gave girl give good great group grow had half hand hard has head hear help her here high
him his home house how idea its just keep kind knew know land large last later learn leave left
letter life light like line list little live long look low made make man many may mean men might
mile miss more most mother mountain move much must name near need never new next night number off
often old once one only open other our out over own page paper part people place plant play point
press read real right river room run said same saw say school sea second see seem sentence set she
should show side small some song soon sound spell stand start state still stop story study such take
talk tell than that them then there these they thing think this those thought three through time
together too took tree try turn two under until use very walk want was watch water way well went
were what when where which while white who why will with wood word work world would write year young
""".split()  # noqa: SIM905 - three hundred words are more readable as text


class WordMix:
    """A mix of common words. A unit is a word."""

    name = "fixed"
    probe_units = (8, 72)
    default_unit_tokens = 1.3

    def text(self, units: int, rng: random.Random) -> str:
        """Return `units` words in random order."""
        return " ".join(rng.choices(COMMON_WORDS, k=units))


MIXES = (WordMix(),)
