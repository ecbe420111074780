// Package mysqltenure keeps leases of package tenure in a table of a MySQL or MariaDB database.
//
// Everything is as on any store of package tenure. An object's version, and with it a fencing token, is
// the server's time in microseconds, or one more than the version before. Leases expire by the server's
// clock; in a Galera cluster or with several primaries, where each node has a clock of its own, the store
// is Clockless, and a standby takes over when it has itself seen no change for the TTL. Fenced writes, also
// in transactions of the program's own, are certain on both.
//
// The store knows terms. Claims need Postgres or SQLite.
package mysqltenure
