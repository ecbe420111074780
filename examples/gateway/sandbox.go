//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
)

// Phase is the state of a sandbox:
//
//	Provisioning --> Ready --> Error        Provisioning can also become Error directly
//	any of these --> Deleting --> gone
//
// A sandbox in phase Error has no process, and is removed after the grace period.
type Phase string

const (
	Provisioning Phase = "Provisioning"
	Ready        Phase = "Ready"
	Error        Phase = "Error"
	Deleting     Phase = "Deleting"
	Unknown      Phase = "Unknown" // its record cannot be read; it can only be deleted
)

// Sandbox is a sandbox as it was when its object was read.
type Sandbox struct {
	Name string `json:"name"`
	record
	Version   int64         `json:"version"`
	CreatedAt time.Time     `json:"created_at"`
	UpdatedAt time.Time     `json:"updated_at"`
	Age       time.Duration `json:"-"` // since the last write, by the store's clock
}

// record is the payload of a sandbox's object.
type record struct {
	Instance string   `json:"instance"` // the driver's ID, new for each creation
	Command  []string `json:"command"`
	Phase    Phase    `json:"phase"`
	PID      int      `json:"pid,omitempty"`
	Message  string   `json:"message,omitempty"` // why the phase is Error
}

const sandboxType = "sandbox"

func sandboxKey(name string) tenure.Key { return tenure.Key{Type: sandboxType, ID: name} }

// sandboxes keeps the sandboxes in a store. Each change is a compare-and-swap on the version
// of the given sandbox: [tenure.ErrConflict] means that another gateway or another request
// changed it first, and nothing was written.
type sandboxes struct {
	store tenure.Store
}

// fenced returns the same sandboxes, with changes that fail with [tenure.ErrLost] once the
// term has ended.
func (s sandboxes) fenced(term *tenure.Term) (sandboxes, error) {
	store, err := tenure.Fence(s.store, term)
	return sandboxes{store}, err
}

// create records a new sandbox. The error is [tenure.ErrExists] or [tenure.ErrTaken] if the
// name is in use.
func (s sandboxes) create(ctx context.Context, name, instance string, command []string) (Sandbox, error) {
	sb := Sandbox{Name: name, record: record{Instance: instance, Command: command, Phase: Provisioning}}
	return s.put(ctx, sb, tenure.IfAbsent())
}

// ready records that a sandbox's process is running.
func (s sandboxes) ready(ctx context.Context, sb Sandbox, pid int) (Sandbox, error) {
	sb.Phase, sb.PID = Ready, pid
	return s.put(ctx, sb, tenure.IfVersion(sb.Version))
}

// fail records why a sandbox has no process.
func (s sandboxes) fail(ctx context.Context, sb Sandbox, message string) (Sandbox, error) {
	sb.Phase, sb.PID, sb.Message = Error, 0, message
	return s.put(ctx, sb, tenure.IfVersion(sb.Version))
}

// exited records that an instance's process has exited, unless the sandbox has another
// instance by now, or is in a phase in which it needs no process.
func (s sandboxes) exited(ctx context.Context, inst Instance) error {
	for {
		sb, err := s.get(ctx, inst.Sandbox)
		switch {
		case errors.Is(err, tenure.ErrNotFound):
			return nil
		case err != nil:
			return err
		case sb.Instance != inst.ID, sb.Phase != Ready && sb.Phase != Provisioning:
			return nil
		}
		_, err = s.fail(ctx, sb, fmt.Sprintf("process %d exited", inst.PID))
		if !errors.Is(err, tenure.ErrConflict) { // after a conflict, look at the sandbox again
			return err
		}
	}
}

// startDeletion records that a sandbox is to be deleted, which cannot be undone.
func (s sandboxes) startDeletion(ctx context.Context, sb Sandbox) (Sandbox, error) {
	sb.Phase, sb.Message = Deleting, ""
	return s.put(ctx, sb, tenure.IfVersion(sb.Version))
}

// finishDeletion ends the sandbox's process and then removes its record, so the process has
// a record for as long as it runs. Any number of gateways may finish a deletion at the same
// time, each from the beginning.
func (s sandboxes) finishDeletion(ctx context.Context, driver Driver, sb Sandbox) error {
	if sb.Instance != "" {
		if err := driver.Delete(ctx, sb.Instance); err != nil {
			return err
		}
	}
	// The process is gone, so remove the record even if ctx is done by now. The fence rejects
	// the write of a job that comes too late.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	err := s.remove(ctx, sb)
	if errors.Is(err, tenure.ErrNotFound) || errors.Is(err, tenure.ErrConflict) {
		return nil // another gateway was faster; the name may even be in use again
	}
	return err
}

func (s sandboxes) remove(ctx context.Context, sb Sandbox) error {
	return s.store.DeleteIf(ctx, sandboxKey(sb.Name), tenure.IfVersion(sb.Version))
}

func (s sandboxes) get(ctx context.Context, name string) (Sandbox, error) {
	obj, err := s.store.Get(ctx, sandboxKey(name))
	if err != nil {
		return Sandbox{}, err
	}
	return decode(obj), nil
}

func (s sandboxes) list(ctx context.Context) ([]Sandbox, error) {
	list := []Sandbox{} // not nil, so that JSON has an empty array
	for obj, err := range tenure.List(ctx, s.store, sandboxType) {
		if err != nil {
			return nil, err
		}
		list = append(list, decode(obj))
	}
	return list, nil
}

func (s sandboxes) put(ctx context.Context, sb Sandbox, cond tenure.WriteCondition) (Sandbox, error) {
	payload, err := json.Marshal(sb.record)
	if err != nil {
		return Sandbox{}, fmt.Errorf("encode sandbox %s: %w", sb.Name, err)
	}
	obj, err := s.store.PutIf(ctx, tenure.Object{Key: sandboxKey(sb.Name), Name: sb.Name, Payload: payload}, cond)
	if err != nil {
		return Sandbox{}, err
	}
	return decode(obj), nil
}

// decode never fails: a record that cannot be read must neither hide the others from a list
// nor escape deletion.
func decode(obj tenure.Object) Sandbox {
	sb := Sandbox{
		Name:      obj.Key.ID,
		Version:   obj.Version,
		CreatedAt: obj.CreatedAt,
		UpdatedAt: obj.UpdatedAt,
		Age:       obj.Age,
	}
	if err := json.Unmarshal(obj.Payload, &sb.record); err != nil {
		sb.record = record{Phase: Unknown, Message: fmt.Sprintf("its record cannot be read: %v", err)}
	}
	return sb
}
