"""One job on several hosts: worker processes, their driver, and how it recovers."""
