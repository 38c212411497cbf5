import resource, subprocess, os
from pathlib import Path
import pytest
from quadriga.cli.main import main

@pytest.mark.parametrize("limit", [3000, 15_000, 200_000, 700_000])
def test_fsize(arguments, limit, capsys, tmp_path):
    args = arguments("trainer.save_freq=1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code = main(["train", *args])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    o = capsys.readouterr()
    print(limit, code, o.out[-300:], o.err, sorted(os.listdir(tmp_path/"run")))

@pytest.mark.parametrize("size", ["100k", "300k", "600k", "1200k","1800k","2600k", "3000k"])
def test_tmpfs(arguments, size, capsys, tmp_path):
    d = tmp_path/"run"; d.mkdir()
    subprocess.run(["mount","-t","tmpfs","-o",f"size={size}","tmpfs",str(d)],check=True)
    try:
        code = main(["train", *arguments("trainer.save_freq=1")])
        o = capsys.readouterr()
        print(size, code, o.out[-300:], o.err, sorted(os.listdir(tmp_path/"run")))
    finally:
        subprocess.run(["umount",str(d)])
