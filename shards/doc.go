// Package shards spreads a fixed set of jobs evenly over the processes that are up. The jobs are one
// kind of work, divided by tenant range, by partition or by number. Each runs on exactly one process.
//
// # Concepts
//
// A [Member] is one process's part in a set of shards. Each process that calls [Member.Run] is a member
// while its [claims.Session] lives. A shard is a claim of that session, so what package claims guarantees
// holds: at any moment at most one session's claim on a shard is valid, and an old owner's func has
// returned before the new one's begins, unless its process has crashed, was cut off, or did not stop its
// funcs in time.
//
// # How it works
//
// Nothing is elected, and no process assigns shards. Each member lists the members and the shards, and
// computes from that how many shards are its own: all members have the same number, or one more. A member
// that has too many stops its newest shards, and frees each when its func has returned. A member that has
// too few claims free ones. When a process joins or leaves, as few shards as possible move: the shards
// that a new member gets, or those that an old member had.
//
// A member counts once it has been present for [Config.Settle], so processes that start together divide
// the shards among them at once. Until then a member neither claims shards nor makes others stop any.
//
// Hints wake the members, which also look once per TTL. The number of statements that they send does not depend
// on the number of shards.
package shards
