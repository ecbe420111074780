//go:build unix

package main

import (
	"context"
	"errors"
	"iter"
	"time"
)

// errNoInstance says that the driver knows no instance of that ID.
var errNoInstance = errors.New("no such instance")

// driverError is a failure of the driver, as opposed to one of the store.
type driverError struct{ err error }

func (e *driverError) Error() string { return e.err.Error() }
func (e *driverError) Unwrap() error { return e.err }

// Driver is the compute driver: what runs the sandboxes. Several gateways share
// its backend, so each method works on instances that another gateway made.
// All methods are safe for concurrent use.
type Driver interface {
	// Create starts the command and returns the instance with its process. Of an
	// instance that it returns an error for, nothing is left running.
	Create(ctx context.Context, id, name string, command []string) (Instance, error)

	// Delete ends the instance's process, waits until it is gone and forgets the
	// instance. It succeeds where there is no such instance, so that a deletion
	// which was interrupted can be done again by anybody.
	Delete(ctx context.Context, id string) error

	// Get returns errNoInstance where there is none.
	Get(ctx context.Context, id string) (Instance, error)

	List(ctx context.Context) ([]Instance, error)

	// Watch yields what happens to instances until ctx ends, beginning with one
	// event for each instance that exists: so a watcher that comes late misses no
	// exit. An error ends the stream.
	Watch(ctx context.Context) iter.Seq2[Event, error]
}

// Instance is one run of a sandbox's command. Its ID is made anew for each
// creation: a sandbox that is deleted and created again under its old name has
// nothing to do with the old process.
type Instance struct {
	ID        string    `json:"instance"`
	Name      string    `json:"name"` // the sandbox's
	Command   []string  `json:"command"`
	CreatedAt time.Time `json:"created_at"`
	PID       int       `json:"pid,omitempty"`   // 0: not started yet
	Birth     string    `json:"birth,omitempty"` // tells the process from a later one with its PID
	Alive     bool      `json:"-"`               // when it was read
}

// Event is something that happened to an instance.
type Event struct {
	Kind     EventKind
	Instance Instance
}

type EventKind string

const (
	Started EventKind = "started"
	Exited  EventKind = "exited"
)
