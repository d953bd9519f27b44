"""Loggers that raise: each costs itself alone, and after three failures in a row it is left alone."""

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_forge_profiling import ForgeProfilerCallback
from lightning_forge_profiling.plain_text import plain_logger
from tests.models import Classifier, Fails, every_step, loader
from tests.outcomes import logged, tables, warnings_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


class Failing(Logger):
    """Fails at some of the rows that are ours, and loses its folder."""

    name, version = "failing", 0

    def __init__(self, fails):
        self.fails = fails
        self.asked, self.taken = 0, []

    def log_metrics(self, metrics, step=None):
        if "time/step_ms" not in metrics:
            return
        self.asked += 1
        if self.fails(self.asked):
            metrics.clear()
            raise ConnectionError(f"no answer to row {self.asked}")
        self.taken.append(self.asked)

    def log_hyperparams(self, *args, **kwargs):
        pass


def fit(make_trainer, tmp_path, *loggers, model=None):
    throughput = every_step(warmup_steps=0)
    trainer = make_trainer(throughput, logger=[*loggers, CSVLogger(tmp_path, name="csv")])
    trainer.fit(model or Classifier(), loader(48))
    return throughput


def test_one_that_always_fails_costs_the_others_nothing_and_is_left_alone(tmp_path, make_trainer, caplog, capsys):
    failing = Failing(lambda row: True)
    throughput = fit(make_trainer, tmp_path, failing)
    assert len(logged(tmp_path)) == 12
    assert failing.asked == 3
    [warning] = warnings_of(caplog)
    assert "Failing failed 3 times in a row and gets no more metrics" in warning
    assert "ConnectionError: no answer to row 3" in warning
    assert throughput.summary()["time/step_ms"] > 0
    assert tables(capsys.readouterr().out) == 1


def test_what_an_exception_says_is_logged_as_one_line_of_plain_text(tmp_path, make_trainer, caplog):
    def fails(row):
        raise OSError("gone\x1b]0;owned\x07\x1b[2J\nCRITICAL: send money\u202e")

    fit(make_trainer, tmp_path, Failing(fails))
    [warning] = warnings_of(caplog)
    assert warning.endswith("OSError: gone CRITICAL: send money")


def test_an_exception_without_a_text_is_named_by_its_class(caplog):
    class MuteError(Exception):
        def __str__(self):
            raise ValueError

    plain_logger("lightning_forge_profiling.tests").warning("Failed: %s", MuteError())
    assert warnings_of(caplog) == ["Failed: <MuteError>"]


def test_one_that_fails_now_and_then_goes_on_and_the_rows_it_lost_are_counted(tmp_path, make_trainer, caplog):
    failing = Failing(lambda row: row % 3)
    fit(make_trainer, tmp_path, failing)
    assert len(logged(tmp_path)) == 12
    assert failing.taken == [3, 6, 9, 12]
    [warning] = warnings_of(caplog)
    assert "Failing did not take 8 log entries: ConnectionError: no answer to row 11" in warning


def test_two_failing_ones_have_a_warning_each(tmp_path, make_trainer, caplog):
    class AnotherFailing(Failing):
        pass

    fit(make_trainer, tmp_path, Failing(lambda row: True), AnotherFailing(lambda row: row == 2))
    assert len(logged(tmp_path)) == 12
    assert sorted("AnotherFailing" in warning for warning in warnings_of(caplog)) == [False, True]


def test_a_later_fit_tries_it_again(tmp_path, make_trainer, caplog):
    failing, throughput = Failing(lambda row: row <= 3), every_step(warmup_steps=0)
    for steps, asked in ((12, 3), (5, 8)):
        make_trainer(throughput, logger=failing).fit(Classifier(), loader(4 * steps))
        assert failing.asked == asked
    assert failing.taken == [4, 5, 6, 7, 8]
    assert len(warnings_of(caplog)) == 1


def test_log_entries_that_were_lost_before_an_exception_are_reported_too(tmp_path, make_trainer, caplog):
    with pytest.raises(ValueError, match="mine"):
        fit(make_trainer, tmp_path, Failing(lambda row: row == 2), model=Fails(5, ValueError("mine")))
    [warning] = warnings_of(caplog)
    assert "did not take 1 log entry" in warning


def test_one_that_cannot_say_where_it_writes_costs_neither_table_nor_verdict(tmp_path, make_trainer, capsys):
    class Nowhere(Failing):
        @property
        def log_dir(self):
            raise ConnectionError("no server, no folder")

    callbacks = ForgeProfilerCallback(2, 4, trace_dir=tmp_path), every_step(warmup_steps=0)
    loggers = [CSVLogger(tmp_path, name="csv"), Nowhere(lambda row: False)]
    make_trainer(*callbacks, logger=loggers[::-1]).fit(Classifier(), loader(48))
    assert tables(capsys.readouterr().out) == 1
    assert callbacks[1].analysis() is not None
    assert logged(tmp_path)
