// Package shards spreads a fixed set of jobs evenly over the processes that are up: the same
// job by tenant range, by partition, or by number, each on exactly one of them.
//
// # Concepts
//
// A [Member] is one process's part in it. Each process that calls [Member.Run] is a member, as
// long as its [claims.Session] lives. A shard is a claim of that session, so what package
// claims guarantees holds: at any moment at most one session's claim on a shard is valid, and
// an old owner's func has returned before the new one's begins, unless its process has crashed,
// was cut off, or did not stop its funcs in time.
//
// # How it works
//
// Nothing is elected, and nobody assigns. The members list each other and the shards, and each
// computes from the list how many shards are its own: all have the same number, or one more. A
// member that has too many stops its newest, and frees each when its func has returned. A
// member that has too few claims what is free. Members that join or leave move as few shards
// as possible: a join moves what the new member gets, and a leave what the old one had.
//
// A member counts when it has been there for a settling time, so processes that start together
// divide the shards among them at once. Until then it neither claims nor makes others stop.
//
// Members are woken by hints, and look once per TTL besides. What they send does not depend on
// the number of shards.
package shards
