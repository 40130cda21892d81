import pytest

from memtrain.engine.schedule import make_schedule


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_peak_at_the_end_of_warm_up(name):
    schedule = make_schedule(name, peak=1.0, warmup=10, steps=20, min_ratio=0.1)
    rates = [schedule(made) for made in range(20)]
    assert rates[:10] == pytest.approx([(k + 1) / 10 for k in range(10)])
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(1.0 if name == "constant" else 0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_no_warm_up_starts_near_the_peak():
    assert make_schedule("linear", 2.0, 0, 100, 0.0)(0) == pytest.approx(2.0 * 0.99)
