//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
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
	st := &serverTest{t: t, store: newStore(t), driver: newFakeDriver()}
	st.server = &server{sandboxes: sandboxes{st.store}, driver: st.driver, log: quiet}
	return st
}

// do sends a request and decodes the answer into body, unless body is nil.
func (st *serverTest) do(method, path, request string, body any) (status int) {
	st.t.Helper()
	w := httptest.NewRecorder()
	st.handler().ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(request)))
	if body != nil {
		require.NoError(st.t, json.Unmarshal(w.Body.Bytes(), body), "%s %s answered %d %q", method, path, w.Code, w.Body)
	}
	return w.Code
}

func (st *serverTest) want(status int, method, path, request string) {
	st.t.Helper()
	require.Equal(st.t, status, st.do(method, path, request, nil), "%s %s %s", method, path, request)
}

const createBox = `{"name":"box","command":["run","it"]}`

func TestASandboxIsCreatedShownListedAndDeleted(t *testing.T) {
	st := newServerTest(t)
	st.want(404, "GET", "/sandboxes/box", "")
	st.want(404, "DELETE", "/sandboxes/box", "")

	var sb Sandbox
	require.Equal(t, 201, st.do("POST", "/sandboxes", createBox, &sb))
	require.Equal(t, Ready, sb.Phase)
	require.Equal(t, 42, sb.PID)
	st.want(409, "POST", "/sandboxes", createBox)
	var shown Sandbox
	require.Equal(t, 200, st.do("GET", "/sandboxes/box", "", &shown))
	require.Equal(t, sb.Version, shown.Version)
	require.Equal(t, sb.Instance, shown.Instance)
	var list []Sandbox
	require.Equal(t, 200, st.do("GET", "/sandboxes", "", &list))
	require.Len(t, list, 1)
	require.Equal(t, "box", list[0].Name)

	st.want(204, "DELETE", "/sandboxes/box", "")
	st.want(404, "GET", "/sandboxes/box", "")
	_, err := st.driver.Get(t.Context(), sb.Instance)
	require.ErrorIs(t, err, errNoInstance)
	var again Sandbox
	require.Equal(t, 201, st.do("POST", "/sandboxes", createBox, &again))
	require.NotEqual(t, sb.Instance, again.Instance)
	require.Greater(t, again.Version, sb.Version)
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
		require.Equal(t, 400, st.do("POST", "/sandboxes", request, &body), "%.80q", request)
		require.NotEmpty(t, body.Error, "%.80q", request)
	}
	var list []Sandbox
	st.do("GET", "/sandboxes", "", &list)
	require.Equal(t, []Sandbox{}, list)
}

func TestASandboxWhoseCommandDoesNotExistIsInError(t *testing.T) {
	st := newServerTest(t)
	var sb Sandbox
	require.Equal(t, 201, st.do("POST", "/sandboxes", `{"name":"box","command":["no-such-command"]}`, &sb))
	require.Equal(t, Error, sb.Phase)
	require.Contains(t, sb.Message, "not found")
	st.want(204, "DELETE", "/sandboxes/box", "")
}

// The watch stream reports the exit once, while the sandbox is still Provisioning.
func TestAProcessThatExitsAtOnceMakesASandboxInError(t *testing.T) {
	st := newServerTest(t)
	st.driver.onCreate = func(id string) {
		inst := Instance{ID: id, Name: "box", PID: 42}
		st.driver.set(inst)
		if err := st.sandboxes.exited(t.Context(), inst); err != nil {
			t.Error(err)
		}
	}
	var sb Sandbox
	require.Equal(t, 201, st.do("POST", "/sandboxes", createBox, &sb))
	require.Equal(t, Error, sb.Phase)
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
	_, err := st.driver.Get(t.Context(), instance)
	require.ErrorIs(t, err, errNoInstance)
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
	st.do("GET", "/sandboxes/box", "", &sb)
	require.Equal(t, Deleting, sb.Phase)
	st.driver.onDelete = nil
	st.want(204, "DELETE", "/sandboxes/box", "")
	st.want(404, "GET", "/sandboxes/box", "")
}

func TestARecordThatCannotBeReadCanBeListedAndDeleted(t *testing.T) {
	st := newServerTest(t)
	st.do("POST", "/sandboxes", createBox, nil)
	_, err := st.store.PutIf(t.Context(), tenure.Object{Key: sandboxKey("broken"), Payload: []byte("{")}, tenure.MustCreate())
	require.NoError(t, err)
	var list []Sandbox
	require.Equal(t, 200, st.do("GET", "/sandboxes", "", &list))
	require.Len(t, list, 2)
	require.Equal(t, Unknown, list[1].Phase)
	st.want(204, "DELETE", "/sandboxes/broken", "")
	st.want(404, "GET", "/sandboxes/broken", "")
}

func TestAStoreThatIsDownIsNotTheClientsFault(t *testing.T) {
	st := newServerTest(t)
	st.store.SetHook(before("put", func() error { return errors.New("dial db.internal: refused") }))
	var body struct{ Error string }
	require.Equal(t, 503, st.do("POST", "/sandboxes", createBox, &body))
	require.NotContains(t, body.Error, "db.internal", "no details")
}

func TestARequestIsCompletedIfTheClientHangsUp(t *testing.T) {
	st := newServerTest(t)
	ctx, hangUp := context.WithCancel(t.Context())
	r := httptest.NewRequest("POST", "/sandboxes", strings.NewReader(createBox)).WithContext(ctx)
	st.store.SetHook(before("put", func() error { hangUp(); return nil }))
	st.handler().ServeHTTP(httptest.NewRecorder(), r)
	var sb Sandbox
	require.Equal(t, 200, st.do("GET", "/sandboxes/box", "", &sb))
	require.Equal(t, Ready, sb.Phase)
}

func TestHealthShowsWhoHoldsTheLease(t *testing.T) {
	st := newServerTest(t)
	var stop func()
	st.watchers, stop = spawn(t, st.store, st.driver, "a")
	var h health
	eventually(t, 10*time.Second, "it has swept", func() bool {
		return st.do("GET", "/healthz", "", &h) == 200 && h.Sweeps == 1
	})
	require.True(t, h.Replica == "a" && h.Role == "holder" && h.Holder == "a" && h.IsHolder && h.Token > 0 && h.Terms == 1, "%+v", h)
	require.InDelta(t, 25, *h.TrustSeconds, 5)
	stop()
	st.do("GET", "/healthz", "", &h)
	require.True(t, !h.IsHolder && h.Role == "standby" && *h.TrustSeconds == 0, "%+v", h)
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
				require.Equal(t, name == step.next, w.coordinator.IsHolder(), "whether %s holds after %+v", name, step)
			}
		}
		for _, request := range []string{``, `{}`} {
			time.Sleep(time.Minute)
			before := gateways["a"].coordinator.Status().Holder
			st.want(202, "POST", "/handover", request)
			time.Sleep(time.Second)
			require.False(t, gateways[before].coordinator.IsHolder(), "after %q", request)
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
		require.True(t, st.watchers.coordinator.IsHolder())
		stop()
		var body struct{ Error string }
		require.Equal(t, 404, st.do("POST", "/handover", `{"to":"b"}`, &body))
		require.Equal(t, "nobody holds the lease", body.Error)
	})
}

func TestANameIsLockedByOneRequestAtATime(t *testing.T) {
	var locks nameLocks
	unlock, err := locks.lock(t.Context(), "box")
	require.NoError(t, err)
	unlockOther, err := locks.lock(t.Context(), "other")
	require.NoError(t, err)
	unlockOther()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = locks.lock(ctx, "box")
	require.ErrorIs(t, err, context.Canceled)
	got := make(chan error)
	go func() {
		unlock, err := locks.lock(t.Context(), "box")
		if err == nil {
			unlock()
		}
		got <- err
	}()
	unlock()
	require.NoError(t, <-got)
	require.Empty(t, locks.locks)
}
