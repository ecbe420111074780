package main

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/tenurelib/tenure"
)

// Phase is the state of a sandbox:
//
//	Provisioning --> Ready --> Error
//
// In phase Error a sandbox has no instance. Its record is removed after the grace period.
type Phase string

const (
	Provisioning Phase = "Provisioning"
	Ready        Phase = "Ready"
	Error        Phase = "Error"
)

// Sandbox is the payload of a sandbox's object, and what was read with it.
type Sandbox struct {
	Name     string `json:"name"`
	Instance string `json:"instance"` // the driver's ID, new for each creation
	Phase    Phase  `json:"phase"`

	version int64
	age     time.Duration // since the last write, by the store's clock
}

const sandboxType = "sandbox"

func sandboxKey(name string) tenure.Key { return tenure.Key{Type: sandboxType, ID: name} }

// sandboxOf returns the name of the sandbox for which an instance was created.
func sandboxOf(instance string) string {
	return instance[:max(0, strings.LastIndex(instance, "."))]
}

// sandboxes keeps the sandboxes in a store. Each change is a compare-and-swap on the version
// of the given sandbox: [tenure.ErrConflict] means that another gateway or another request
// changed it first, and nothing was written.
type sandboxes struct {
	store tenure.Store
}

// fenced returns the same sandboxes, with changes that fail with [tenure.ErrLost] once the
// term of the job that ctx comes from has ended.
func (s sandboxes) fenced(ctx context.Context) (sandboxes, error) {
	store, err := tenure.Fence(s.store, tenure.TermFromContext(ctx))
	return sandboxes{store}, err
}

// create records a new sandbox. The error is [tenure.ErrExists] or [tenure.ErrTaken] if the
// name is in use.
func (s sandboxes) create(ctx context.Context, name string) (Sandbox, error) {
	return s.put(ctx, Sandbox{Name: name, Instance: name + "." + uuid.NewString(), Phase: Provisioning}, tenure.IfAbsent())
}

func (s sandboxes) set(ctx context.Context, sb Sandbox, phase Phase) (Sandbox, error) {
	sb.Phase = phase
	return s.put(ctx, sb, tenure.IfVersion(sb.version))
}

func (s sandboxes) put(ctx context.Context, sb Sandbox, cond tenure.WriteCondition) (Sandbox, error) {
	payload, err := json.Marshal(sb)
	if err != nil {
		return Sandbox{}, err
	}
	obj, err := s.store.PutIf(ctx, tenure.Object{Key: sandboxKey(sb.Name), Name: sb.Name, Payload: payload}, cond)
	if err != nil {
		return Sandbox{}, err
	}
	return decode(obj)
}

func (s sandboxes) remove(ctx context.Context, sb Sandbox) error {
	return s.store.DeleteIf(ctx, sandboxKey(sb.Name), tenure.IfVersion(sb.version))
}

func (s sandboxes) get(ctx context.Context, name string) (Sandbox, error) {
	obj, err := s.store.Get(ctx, sandboxKey(name))
	if err != nil {
		return Sandbox{}, err
	}
	return decode(obj)
}

func (s sandboxes) list(ctx context.Context) ([]Sandbox, error) {
	list := []Sandbox{} // not nil, so that JSON has an empty array
	for obj, err := range tenure.List(ctx, s.store, sandboxType) {
		if err != nil {
			return nil, err
		}
		sb, err := decode(obj)
		if err != nil {
			return nil, err
		}
		list = append(list, sb)
	}
	return list, nil
}

func decode(obj tenure.Object) (Sandbox, error) {
	sb := Sandbox{version: obj.Version, age: obj.Age}
	return sb, json.Unmarshal(obj.Payload, &sb)
}
