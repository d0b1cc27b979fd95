"""How ``hvkit run`` watches its ranks, whatever started them.

Every rank's command runs below an agent (:mod:`.agent`), which holds a TCP connection to the
supervisor in ``hvkit run`` (:mod:`.supervisor`). Over it go what the command prints and how it
ends; the kernels at both ends watch whether the other is still there (:mod:`.liveness`). An agent
that loses the supervisor ends its command, and a guard above it (:mod:`.guard`) what is left when
an agent is killed, so that nothing remains on any host, whatever is killed or cut off.
"""
