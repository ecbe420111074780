//go:build unix

package main

import (
	"context"
	"errors"
	"iter"
	"time"
)

// errNoInstance means that the driver has no instance with that ID.
var errNoInstance = errors.New("no such instance")

// driverError is a failure of the driver, as opposed to one of the store.
type driverError struct{ err error }

func (e *driverError) Error() string { return e.err.Error() }
func (e *driverError) Unwrap() error { return e.err }

// Driver is the compute driver, which runs the sandboxes. Several gateways share its
// backend, so every method also works on instances that another gateway created. All
// methods are safe for concurrent use.
type Driver interface {
	// Create starts the command and returns the instance with its process. If it returns
	// an error, it has left nothing running.
	Create(ctx context.Context, id, name string, command []string) (Instance, error)

	// Delete ends the instance's process, waits until it is gone, and removes the instance.
	// It succeeds if there is no such instance, so that any gateway can repeat a deletion
	// that was interrupted.
	Delete(ctx context.Context, id string) error

	// Get returns errNoInstance if there is no such instance.
	Get(ctx context.Context, id string) (Instance, error)

	List(ctx context.Context) ([]Instance, error)

	// Watch yields the events of instances until ctx is done. It begins with one event for
	// each instance that exists, so a watcher that starts late doesn't miss an exit. An
	// error ends the stream.
	Watch(ctx context.Context) iter.Seq2[Event, error]
}

// Instance is one run of a sandbox's command. Each creation gets a new ID, so a sandbox
// that is deleted and created again under the same name is not confused with the old
// process.
type Instance struct {
	ID        string    `json:"instance"`
	Name      string    `json:"name"` // the sandbox's
	Command   []string  `json:"command"`
	CreatedAt time.Time `json:"created_at"`
	PID       int       `json:"pid,omitempty"`   // 0 if not started yet
	Birth     string    `json:"birth,omitempty"` // distinguishes the process from a later one with its PID
	Alive     bool      `json:"-"`               // when the instance was read
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
