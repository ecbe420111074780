//go:build unix

package main

import (
	"context"
	"iter"
	"time"
)

// Driver runs the sandboxes' processes. The gateways share its backend, and each method also
// works on instances that another gateway created. All methods are safe for concurrent use.
type Driver interface {
	// Create starts the command and returns the ID of its process. If it returns an error,
	// nothing runs.
	Create(ctx context.Context, id string, command []string) (pid int, err error)

	// Delete ends the instance's processes, waits until they are gone, and removes the
	// instance. It returns nil if there is no such instance, so any gateway can repeat a
	// deletion that was interrupted.
	Delete(ctx context.Context, id string) error

	List(ctx context.Context) ([]Instance, error)

	// Watch yields each instance that has exited, until ctx is done. It begins with those
	// that exited before the call. An error ends it.
	Watch(ctx context.Context) iter.Seq2[Instance, error]
}

// Instance is one run of a sandbox's command. Its ID is the sandbox's name, a dot, and a part that
// is new for each run, so that a sandbox that is deleted and created again under the same name is
// not confused with its earlier process.
type Instance struct {
	ID        string
	Sandbox   string // its name
	PID       int    // 0: not known yet
	CreatedAt time.Time
	Alive     bool // when the instance was read
}
