// Package kills kills processes under a witness, with SIGKILL at random instants around their start, an acquire, a
// renewal, a fenced commit and a claim, and judges three things. No two jobs overlap, not even that of a process that has
// not died yet. No term is left to its TTL when its witness has ended. And no fenced write of a dead process
// lands after the next term has begun. `make witness` makes ten thousand kills; the tests make some.
//
// With -kills.early, a release comes about 5 ms after the kill, and the test must report overlaps. An overlap shows only if
// the next job begins before the last process that the kill has left is dead. On SQLite the next job began 38 ms after such
// a release at p50, and 19 to 21 ms at p10, because standbys look at the file less often while it is written all the time.
// So only a few kills show one there: 2 and 4 of 60 in two runs, and none of 40 in another. Use -kills 200 for SQLite.
package kills
