package record

import (
	"strings"
	"sync/atomic"

	"github.com/google/uuid"
)

// Process is what the IDs of all terms begin with that one process begins, whichever lease and store it uses. A record so
// tells this process from an earlier one with the same holder's name, without anything to remember.
type Process string

const processLength = len("12345678-1234") // 48 random bits; each ID has 74 more

var process atomic.Pointer[Process]

func newProcess() *Process {
	p := Process(uuid.NewString()[:processLength])
	return &p
}

// ThisProcess returns the process of a lease that is made now.
func ThisProcess() Process {
	if process.Load() == nil {
		process.CompareAndSwap(nil, newProcess())
	}
	return *process.Load()
}

// Restart makes the leases that are made from now on belong to another process. It is for tests, which have only one.
func Restart() { process.Store(newProcess()) }

// NewTerm returns the ID of a new term, a UUID.
func (p Process) NewTerm() string { return string(p) + uuid.NewString()[processLength:] }

// HasBegun reports whether a term is one of this process.
func (p Process) HasBegun(term string) bool { return strings.HasPrefix(term, string(p)) }
