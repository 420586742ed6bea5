"""The text of a report."""

import dataclasses

from balanced_parallel.diagnostics.verification_report import VerificationReport

EQUAL = VerificationReport(("cpu",), 2, 1e-10, 1.5, 1.5, 0.0, {"weight": 1e-16}, None, ())


def test_counts_are_written_as_words():
    assert "equal within 1e-10: 1 replica (cpu), 2 micro-batches" in str(EQUAL)
    assert "2 replicas (cpu, cpu), 1 micro-batch\n" in str(dataclasses.replace(EQUAL, devices=("cpu",) * 2, micro_batches=1))


def test_a_difference_without_a_reason_names_the_next_steps():
    different = dataclasses.replace(EQUAL, loss_error=0.1)
    following = "no known reason: `python -m balanced_parallel doctor`, and docs/exactness.md"
    assert following in str(different)
    assert following not in str(EQUAL)
    assert following not in str(dataclasses.replace(different, reasons=("dropout: 1",)))


def test_a_buffer_that_differs_is_in_the_table():
    report = dataclasses.replace(EQUAL, state_errors={"norm.rows": 0.6})
    assert not report.equal
    lines = str(report).splitlines()
    assert lines[0].startswith("DIFFERENT")
    assert "buffer norm.rows  6.0e-01  <-" in lines
