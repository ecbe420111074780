//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// serverTest is a server without a network, on an in-memory store.
type serverTest struct {
	*server
	t      *testing.T
	store  *storetest.FaultyStore
	driver *fakeDriver
}

func newServerTest(t *testing.T) *serverTest {
	st := &serverTest{t: t, store: newStore(), driver: newFakeDriver()}
	st.server = &server{sandboxes: sandboxes{st.store}, driver: st.driver, log: quiet}
	return st
}

// do sends a request and decodes the answer into body, unless body is nil.
func (st *serverTest) do(method, path, request string, body any) (status int) {
	st.t.Helper()
	w := httptest.NewRecorder()
	st.handler().ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(request)))
	if body != nil {
		if err := json.Unmarshal(w.Body.Bytes(), body); err != nil {
			st.t.Fatalf("%s %s answered %d %q: %v", method, path, w.Code, w.Body, err)
		}
	}
	return w.Code
}

func (st *serverTest) want(status int, method, path, request string) {
	st.t.Helper()
	if got := st.do(method, path, request, nil); got != status {
		st.t.Errorf("%s %s %s answered %d, want %d", method, path, request, got, status)
	}
}

const createBox = `{"name":"box","command":["run","it"]}`

func TestASandboxIsCreatedShownListedAndDeleted(t *testing.T) {
	st := newServerTest(t)
	st.want(404, "GET", "/sandboxes/box", "")
	st.want(404, "DELETE", "/sandboxes/box", "")

	var sb Sandbox
	if got := st.do("POST", "/sandboxes", createBox, &sb); got != http.StatusCreated || sb.Phase != Ready || sb.PID != 42 {
		t.Errorf("created: %d, %+v", got, sb)
	}
	st.want(409, "POST", "/sandboxes", createBox)
	var shown Sandbox
	if got := st.do("GET", "/sandboxes/box", "", &shown); got != 200 || shown.Version != sb.Version || shown.Instance != sb.Instance {
		t.Errorf("shown: %d, %+v, want %+v", got, shown, sb)
	}
	var list []Sandbox
	if got := st.do("GET", "/sandboxes", "", &list); got != 200 || len(list) != 1 || list[0].Name != "box" {
		t.Errorf("listed: %d, %+v", got, list)
	}

	st.want(204, "DELETE", "/sandboxes/box", "")
	st.want(404, "GET", "/sandboxes/box", "")
	if _, err := st.driver.Get(t.Context(), sb.Instance); !errors.Is(err, errNoInstance) {
		t.Errorf("its instance: %v, want %v", err, errNoInstance)
	}
	var again Sandbox
	if got := st.do("POST", "/sandboxes", createBox, &again); got != 201 || again.Instance == sb.Instance || again.Version <= sb.Version {
		t.Errorf("created again: %d, %+v after %+v", got, again, sb)
	}
}

func TestABadRequestIsRefused(t *testing.T) {
	st := newServerTest(t)
	for _, request := range []string{
		``,
		`no JSON`,
		`[]`,
		`{"name":"box"}`,
		`{"name":"box","command":[]}`,
		`{"name":"box","command":[""]}`,
		`{"name":"box","command":["a\u0000b"]}`,
		`{"name":"box","command":"run"}`,
		`{"name":"box","command":["run"],"comand":["run"]}`,
		createBox + createBox,
		`{"command":["run"]}`,
		`{"name":"Box","command":["run"]}`,
		`{"name":"../box","command":["run"]}`,
		fmt.Sprintf(`{"name":%q,"command":["run"]}`, strings.Repeat("a", 64)),
		fmt.Sprintf(`{"name":"box","command":["run",%q]}`, strings.Repeat("a", maxRequest)),
	} {
		var body struct{ Error string }
		if got := st.do("POST", "/sandboxes", request, &body); got != http.StatusBadRequest || body.Error == "" {
			t.Errorf("%.80q answered %d %+v, want %d and a reason", request, got, body, http.StatusBadRequest)
		}
	}
	var list []Sandbox
	if st.do("GET", "/sandboxes", "", &list); list == nil || len(list) != 0 {
		t.Errorf("there are %v, want an empty list", list)
	}
}

func TestASandboxWhoseCommandDoesNotExistIsInError(t *testing.T) {
	st := newServerTest(t)
	var sb Sandbox
	got := st.do("POST", "/sandboxes", `{"name":"box","command":["no-such-command"]}`, &sb)
	if got != http.StatusCreated || sb.Phase != Error || !strings.Contains(sb.Message, "not found") {
		t.Errorf("got %d, %+v", got, sb)
	}
	st.want(204, "DELETE", "/sandboxes/box", "")
}

// The watch stream reports the exit while the sandbox is still Provisioning, and doesn't
// report it again.
func TestASandboxWhoseProcessExitsAtOnceIsInError(t *testing.T) {
	st := newServerTest(t)
	st.driver.onCreate = func(id string) {
		inst := Instance{ID: id, Name: "box", PID: 42}
		st.driver.set(inst)
		if err := st.sandboxes.exited(t.Context(), inst); err != nil {
			t.Error(err)
		}
	}
	var sb Sandbox
	if got := st.do("POST", "/sandboxes", createBox, &sb); got != http.StatusCreated || sb.Phase != Error {
		t.Errorf("got %d, %+v", got, sb)
	}
}

func TestASandboxThatIsDeletedWhileItIsCreatedLeavesNothing(t *testing.T) {
	st := newServerTest(t)
	other := &server{sandboxes: st.sandboxes, driver: st.driver, log: quiet}
	var instance string
	st.driver.onCreate = func(id string) {
		instance = id
		if err := other.deleteSandbox(t.Context(), "box"); err != nil {
			t.Error(err)
		}
		st.driver.set(Instance{ID: id, Name: "box", PID: 42, Alive: true}) // the deletion came before the process was created
	}
	st.want(409, "POST", "/sandboxes", createBox)
	st.want(404, "GET", "/sandboxes/box", "")
	if _, err := st.driver.Get(t.Context(), instance); !errors.Is(err, errNoInstance) {
		t.Errorf("its instance: %v, want %v", err, errNoInstance)
	}
}

func TestADeletionPrevailsOverConcurrentWrites(t *testing.T) {
	st := newServerTest(t)
	var sb Sandbox
	st.do("POST", "/sandboxes", createBox, &sb)
	st.store.SetHook(before("put", func() error {
		st.store.SetHook(nil)
		return st.sandboxes.exited(t.Context(), Instance{ID: sb.Instance, Name: "box"})
	}))
	st.want(204, "DELETE", "/sandboxes/box", "")
	st.want(404, "GET", "/sandboxes/box", "")
}

func TestADeletionThatFailedCanBeRepeated(t *testing.T) {
	st := newServerTest(t)
	st.do("POST", "/sandboxes", createBox, nil)
	st.driver.onDelete = func(string) error { return errors.New("it resists") }
	st.want(500, "DELETE", "/sandboxes/box", "")
	var sb Sandbox
	if st.do("GET", "/sandboxes/box", "", &sb); sb.Phase != Deleting {
		t.Errorf("meanwhile it is %+v", sb)
	}
	st.driver.onDelete = nil
	st.want(204, "DELETE", "/sandboxes/box", "")
	st.want(404, "GET", "/sandboxes/box", "")
}

func TestARecordThatCannotBeReadCanBeListedAndDeleted(t *testing.T) {
	st := newServerTest(t)
	st.do("POST", "/sandboxes", createBox, nil)
	if _, err := st.store.PutIf(t.Context(), tenure.Object{Key: sandboxKey("broken"), Payload: []byte("{")}, tenure.MustCreate()); err != nil {
		t.Fatal(err)
	}
	var list []Sandbox
	if got := st.do("GET", "/sandboxes", "", &list); got != 200 || len(list) != 2 || list[1].Phase != Unknown {
		t.Errorf("listed: %d, %+v", got, list)
	}
	st.want(204, "DELETE", "/sandboxes/broken", "")
	st.want(404, "GET", "/sandboxes/broken", "")
}

func TestAStoreThatIsDownIsNotTheClientsFault(t *testing.T) {
	st := newServerTest(t)
	st.store.SetHook(before("put", func() error { return errors.New("dial db.internal: refused") }))
	var body struct{ Error string }
	if got := st.do("POST", "/sandboxes", createBox, &body); got != http.StatusServiceUnavailable || strings.Contains(body.Error, "db.internal") {
		t.Errorf("got %d %+v, want %d and no details", got, body, http.StatusServiceUnavailable)
	}
}

func TestARequestIsCompletedIfTheClientHangsUp(t *testing.T) {
	st := newServerTest(t)
	ctx, hangUp := context.WithCancel(t.Context())
	r := httptest.NewRequest("POST", "/sandboxes", strings.NewReader(createBox)).WithContext(ctx)
	st.store.SetHook(before("put", func() error { hangUp(); return nil }))
	st.handler().ServeHTTP(httptest.NewRecorder(), r)
	var sb Sandbox
	if got := st.do("GET", "/sandboxes/box", "", &sb); got != 200 || sb.Phase != Ready {
		t.Errorf("got %d, %+v, want it %s", got, sb, Ready)
	}
}

func TestHealthShowsWhoHoldsTheLease(t *testing.T) {
	st := newServerTest(t)
	var stop func()
	st.watchers, stop = spawn(t, st.store, st.driver, "a")
	var h health
	eventually(t, 10*time.Second, "it has swept", func() bool {
		return st.do("GET", "/healthz", "", &h) == 200 && h.Sweeps == 1
	})
	if h.Replica != "a" || h.Role != "holder" || h.Holder != "a" || !h.IsHolder || h.Token <= 0 || h.Terms != 1 {
		t.Errorf("the holder answered %+v", h)
	}
	if h.TrustSeconds == nil || *h.TrustSeconds < 20 || *h.TrustSeconds > 30 {
		t.Errorf("the holder reports trust for %v seconds", h.TrustSeconds)
	}
	stop()
	if st.do("GET", "/healthz", "", &h); h.IsHolder || h.Role != "standby" || *h.TrustSeconds != 0 {
		t.Errorf("after the coordinator ended it answered %+v", h)
	}
}

func TestAnyGatewayTakesARequestToHandTheLeaseOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newServerTest(t)
		gateways := make(map[string]*watchers)
		for _, name := range []string{"a", "b", "c"} {
			gateways[name], _ = spawn(t, st.store, st.driver, name)
			synctest.Wait()
		}
		for _, step := range []struct{ asked, request, next string }{
			{"b", `{"to":"c"}`, "c"}, // a standby, for another
			{"c", `{"to":"a"}`, "a"}, // the holder
			{"c", `{"to":"c"}`, "c"}, // a standby, for itself
			{"c", `{"to":"c"}`, "c"}, // the holder, for itself
		} {
			time.Sleep(time.Minute) // the previous holder competes again
			st.watchers = gateways[step.asked]
			st.want(202, "POST", "/handover", step.request)
			time.Sleep(time.Second)
			for name, w := range gateways {
				if got, want := w.coordinator.IsHolder(), name == step.next; got != want {
					t.Errorf("%s asked for %s: %s is holder: %v", step.asked, step.request, name, got)
				}
			}
		}
		for _, request := range []string{``, `{}`} {
			time.Sleep(time.Minute)
			before := gateways["a"].coordinator.Status().Holder
			st.want(202, "POST", "/handover", request)
			time.Sleep(time.Second)
			if gateways[before].coordinator.IsHolder() {
				t.Errorf("after %q the holder is still %s", request, before)
			}
		}
	})
}

func TestAnInvalidHandoverIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newServerTest(t)
		var stop func()
		st.watchers, stop = spawn(t, st.store, st.driver, "a")
		synctest.Wait()
		for _, request := range []string{`no JSON`, `{"to":1}`, `{"for":"b"}`, `{"to":"b"}{}`, `{"to":"\u0000"}`} {
			st.want(400, "POST", "/handover", request)
		}
		st.store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error { return errors.New("down") })
		st.want(503, "POST", "/handover", `{"to":"b"}`)
		st.store.SetHook(nil)
		if !st.watchers.coordinator.IsHolder() {
			t.Error("a refused request ended the term")
		}
		stop()
		var body struct{ Error string }
		if got := st.do("POST", "/handover", `{"to":"b"}`, &body); got != 404 || body.Error != "nobody holds the lease" {
			t.Errorf("after the coordinator ended it answered %d %+v", got, body)
		}
	})
}

func TestANameIsLockedByOneRequestAtATime(t *testing.T) {
	var locks nameLocks
	unlock, err := locks.lock(t.Context(), "box")
	if err != nil {
		t.Fatal(err)
	}
	if unlockOther, err := locks.lock(t.Context(), "other"); err != nil {
		t.Errorf("another name: %v", err)
	} else {
		unlockOther()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := locks.lock(ctx, "box"); !errors.Is(err, context.Canceled) {
		t.Errorf("the same name: got %v, want %v", err, context.Canceled)
	}
	got := make(chan error)
	go func() {
		unlock, err := locks.lock(t.Context(), "box")
		if err == nil {
			unlock()
		}
		got <- err
	}()
	unlock()
	if err := <-got; err != nil {
		t.Errorf("after it was unlocked: %v", err)
	}
	if len(locks.locks) != 0 {
		t.Errorf("%d locks are left", len(locks.locks))
	}
}
