// Package kills kills processes under a witness, with SIGKILL at random instants around their start, an acquire, a
// renewal, a fenced commit and a claim, and judges three things. No two jobs overlap, not even that of a process that has
// not died yet. No term is left to its TTL when its witness has ended. And no fenced write of a dead process
// lands after the next term has begun. `make witness` makes ten thousand kills; the tests make some.
package kills
