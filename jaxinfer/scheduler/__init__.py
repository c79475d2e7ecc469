"""Which sequences run in the next step, and who owns which page. Host integers only; never imports JAX.

The engine makes plan n+1 before it reads the result of step n. Six things follow, and all of this package keeps to
them.

1. A decode row is planned for a token that is still on the device. Length limits are known ahead and never planned
   past; a stop id is seen only in `apply`, when one more row of that sequence may be in flight. That row is wasted: its
   result is dropped, because results are matched to the sequences that held the slots when the plan was made.
2. Slots and pages are given back at once, even while a step in flight uses them. This is safe because the device runs
   steps in the order of their plans: a page handed out in plan k is first written in step k, after every step that
   knew its former owner has run, and plan k holds no row of that owner.
3. A preempted sequence may have a token in flight. It takes the token while it waits, and is admitted only after that.
   (With MAX_IN_FLIGHT plans the token has always come before the next plan is made; `_admit` looks all the same.)
4. A page that a chunk fills is in the prefix cache from its plan on, and may be shared in that same plan: in every
   layer a step with chunks writes the keys and values of all its tokens before any row reads them. Nobody writes to a
   shared page, since it is full, and a sequence computes only positions behind its hit.
5. The copies of a plan are made in order, before its step. So a page is copied only if an earlier plan filled it. It
   needs no lock: whoever gets it in the same plan writes to it after the copy, in the step or as the target of a later
   copy. No source is the target of an earlier copy, since targets are filled by this plan at the soonest.
6. A sequence that ends or is preempted leaves the cache those positions whose tokens are known. A row in flight may
   compute one more: behind the filled part of its last page, which others only copy, or on a page that is not kept.
"""
