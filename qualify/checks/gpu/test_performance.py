"""Stage "performance": the rounds of the serving benchmark; a wrong count or an error fails it, no rate does here."""

from qualify import serving

REPETITIONS = 3


def test_rounds(server, measure):
    found = serving.rounds(server, REPETITIONS)
    assert found.keys() == serving.ROUNDS.keys()
    measure(repetitions=REPETITIONS, **found)
