package logtext

import (
	"cmp"

	"github.com/tenurelib/tenure/internal/objects"
)

// Attrs returns the attributes of all lines about a lease.
func Attrs(lease objects.ID, replica string) []any {
	if lease.Type == objects.SessionType {
		return []any{"session", lease.ID, "replica", replica}
	}
	return []any{"lease", lease.String(), "replica", replica}
}

// Line returns the line that is logged about a lease. For the lease of a session of package claims that is a line about
// the session, because its user knows of neither a lease nor a job.
func Line(lease objects.ID, line string) string {
	if lease.Type == objects.SessionType {
		return cmp.Or(sessionLines[line], line)
	}
	return line
}

var sessionLines = map[string]string{
	"lease acquired":      "session begun",
	"lease renewed":       "session renewed",
	"lease renewed again": "session renewed again",
	"lease kept over a failover of the database":                                     "session kept over a failover of the database",
	"the database has failed over and lost the lease's record; it was written again": "the database has failed over and lost the session's record; it was written again",
	"lease lost":                              "session lost",
	"lease lost before it was released":       "session lost before it was ended",
	"lease released":                          "session ended",
	"failed to renew lease; retrying":         "failed to renew session; retrying",
	"failed to release lease; it will expire": "failed to end session; it will expire",
	"job is told to return":                   "session ends",
	"job returned":                            "funcs of the session have returned",
	"job has not returned although its context has ended; its lease is no longer renewed": "funcs of the session have not returned although their contexts have ended; it is no longer renewed",
	"lease record cannot be decoded; it counts as held by unknown until it expires":       "record of the session cannot be decoded; it counts as held by unknown until it expires",
}
