package main

import (
	"context"
	"errors"
	"io/fs"
	"iter"
	"os"
	"time"
)

// Driver is the way to the backend, which all gateways share. Each method also works on instances
// that another gateway created. All methods are safe for concurrent use.
//
// The ID of an instance is the sandbox's name, a dot, and a part that is new for each creation, so
// that a sandbox that is deleted and created again is not confused with its earlier instance.
type Driver interface {
	Create(ctx context.Context, instance string) error

	// Delete returns nil if there is no such instance, so any gateway can repeat a deletion
	// that was interrupted.
	Delete(ctx context.Context, instance string) error

	Has(ctx context.Context, instance string) (bool, error)

	// List returns when each instance was created.
	List(ctx context.Context) (map[string]time.Time, error)

	// Watch yields each instance that goes, until ctx is done. An error ends it.
	Watch(ctx context.Context) iter.Seq2[string, error]
}

// dirDriver stands for a real backend, such as a container runtime. Each instance is a file in a
// directory, and removing the file is how an instance fails.
type dirDriver struct{ dir *os.Root }

func (d dirDriver) Create(_ context.Context, instance string) error {
	return d.dir.WriteFile(instance, nil, 0o600)
}

func (d dirDriver) Delete(_ context.Context, instance string) error {
	return d.dir.RemoveAll(instance)
}

func (d dirDriver) Has(_ context.Context, instance string) (bool, error) {
	_, err := d.dir.Stat(instance)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func (d dirDriver) List(context.Context) (map[string]time.Time, error) {
	entries, err := fs.ReadDir(d.dir.FS(), ".")
	instances := make(map[string]time.Time)
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil { // otherwise it is gone already
			instances[entry.Name()] = info.ModTime()
		}
	}
	return instances, err
}

func (d dirDriver) Watch(ctx context.Context) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		var known map[string]time.Time
		for ctx.Err() == nil {
			now, err := d.List(ctx)
			if err != nil {
				yield("", err)
				return
			}
			for instance := range known {
				if _, exists := now[instance]; !exists && !yield(instance, nil) {
					return
				}
			}
			known = now
			select {
			case <-ctx.Done():
			case <-time.After(250 * time.Millisecond):
			}
		}
	}
}
