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
	st.server = &server{sandboxes: sandboxes{st.store}, driver: st.driver}
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
	exists, _ := st.driver.has(sb.Instance)
	require.False(t, exists)
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

// Watch reports the exit once, while the sandbox is still Provisioning.
func TestAProcessThatExitsAtOnceMakesASandboxInError(t *testing.T) {
	st := newServerTest(t)
	st.driver.onCreate = func(id string) {
		inst := Instance{ID: id, Sandbox: "box", PID: 42}
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
	var instance string
	st.driver.onCreate = func(id string) {
		instance = id
		st.want(204, "DELETE", "/sandboxes/box", "")
		st.driver.set(Instance{ID: id, PID: 42, Alive: true}) // the deletion came before the process was created
	}
	st.want(409, "POST", "/sandboxes", createBox)
	st.want(404, "GET", "/sandboxes/box", "")
	exists, _ := st.driver.has(instance)
	require.False(t, exists)
}

func TestADeletionPrevailsOverConcurrentWrites(t *testing.T) {
	st := newServerTest(t)
	var sb Sandbox
	st.do("POST", "/sandboxes", createBox, &sb)
	st.store.SetHook(before("put", func() error {
		st.store.SetHook(nil)
		return st.sandboxes.exited(t.Context(), Instance{ID: sb.Instance, Sandbox: "box"})
	}))
	st.want(204, "DELETE", "/sandboxes/box", "")
	st.want(404, "GET", "/sandboxes/box", "")
}

func TestADeletionThatFailedCanBeRepeated(t *testing.T) {
	st := newServerTest(t)
	st.do("POST", "/sandboxes", createBox, nil)
	st.driver.onDelete = func(string) error { return errors.New("it resists") }
	st.want(503, "DELETE", "/sandboxes/box", "")
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
	_, err := st.store.PutIf(t.Context(), tenure.Object{Key: sandboxKey("broken"), Payload: []byte("{")}, tenure.IfAbsent())
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
