"""Run a script, then wait a moment before the process ends.

PyTorch 2.13 with gloo may abort ("terminate called without an active exception") in a process that
ends right after `destroy_process_group`: a thread of the group still runs. A script that uses
`torch.distributed` alone does it too, a barrier before does not help, a short wait after does. The
wait is here and not in the scripts, so that any other failure at exit is still seen.
"""

import runpy
import sys
import time

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    time.sleep(0.5)
