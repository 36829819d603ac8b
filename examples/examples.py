"""Found in place of the package `examples` if a file of it runs as a script: says how to run the example."""

import os
import sys

# with -m the name of the module is not known yet
_name = "NAME" if sys.argv[0] == "-m" else os.path.splitext(os.path.basename(sys.argv[0]))[0]
_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.stderr.write(f"error: an example is a module: cd {_checkout} && python -m examples.{_name}\n")
sys.exit(2)
