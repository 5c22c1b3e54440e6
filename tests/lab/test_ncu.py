"""Tests of how ncu's output is read, and of what is refused."""

from __future__ import annotations

import pytest

from nbcnn.lab.measure import dram, ncu

NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","a","dram__bytes_read.sum","Mbyte","1.5"
"0","7","a","dram__bytes_write.sum","Kbyte","1,250"
"0","7","a","gpu__time_duration.sum","us","10"
"0","7","a","lts__t_sectors_op_write.sum","sector","100"
"1","7","a","dram__bytes_read.sum","byte","500000"
"1","7","a","dram__bytes_write.sum","byte","0"
"1","7","a","gpu__time_duration.sum","ns","5000"
"1","7","a","lts__t_sectors_op_write.sum","sector","0"
"""


def test_what_ncu_prints_is_read_kernel_by_kernel_in_bytes_and_milliseconds():
    first = {"dram_read": 1.5e6, "dram_written": 1.25e6, "kernel_ms": pytest.approx(0.01), "l2_write_bytes": 3200.0}
    assert ncu.parse(NCU, dram.METRICS) == [first, {"dram_read": 5e5, "dram_written": 0.0, "kernel_ms": pytest.approx(0.005), "l2_write_bytes": 0.0}]


def test_what_is_not_asked_for_is_left_out():
    assert ncu.parse(NCU, {"gpu__time_duration.sum": "ms"}) == [{"ms": pytest.approx(0.01)}, {"ms": pytest.approx(0.005)}]


def test_what_ncu_refuses_is_said():
    with pytest.raises(ncu.NotCounted, match="ERR_NVGPUCTRPERM"):
        ncu.parse("==PROF== x\n==ERROR== ERR_NVGPUCTRPERM - no permission\n", dram.METRICS)
    with pytest.raises(ncu.NotCounted, match="no output"):
        ncu.parse("", dram.METRICS)


def test_more_time_than_it_has_is_said(monkeypatch):
    def forever(command, **options):
        raise ncu.subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(ncu.shutil, "which", lambda name: "/bin/ncu")
    monkeypatch.setattr(ncu.subprocess, "run", forever)
    with pytest.raises(ncu.NotCounted, match="within 3 s"):
        ncu.count("nbcnn.lab.measure.dram", ("relu_fprop", "1,1,1,1", "cpu"), dram.METRICS, 3.0)
