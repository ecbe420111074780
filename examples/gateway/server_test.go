package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

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

// want sends a request, checks the status, and decodes the answer into body, unless body is nil.
func (st *serverTest) want(status int, method, path string, body any) {
	st.t.Helper()
	w := httptest.NewRecorder()
	st.handler().ServeHTTP(w, httptest.NewRequest(method, path, nil))
	require.Equal(st.t, status, w.Code, "%s %s answered %s", method, path, w.Body)
	if body != nil {
		require.NoError(st.t, json.Unmarshal(w.Body.Bytes(), body))
	}
}

func TestASandboxIsCreatedShownListedAndDeleted(t *testing.T) {
	st := newServerTest(t)
	st.want(404, "GET", "/sandboxes/box", nil)
	st.want(404, "DELETE", "/sandboxes/box", nil)

	var sb, shown, again Sandbox
	st.want(200, "PUT", "/sandboxes/box", &sb)
	require.Equal(t, Ready, sb.Phase)
	st.want(409, "PUT", "/sandboxes/box", nil)
	st.want(200, "GET", "/sandboxes/box", &shown)
	require.Equal(t, sb, shown)
	var list []Sandbox
	st.want(200, "GET", "/sandboxes", &list)
	require.Equal(t, []Sandbox{sb}, list)

	st.want(200, "DELETE", "/sandboxes/box", nil)
	st.want(404, "GET", "/sandboxes/box", nil)
	require.Empty(t, st.driver.instances)
	st.want(200, "PUT", "/sandboxes/box", &again)
	require.NotEqual(t, sb.Instance, again.Instance)
}

func TestASandboxThatIsDeletedWhileItIsCreatedLeavesNothing(t *testing.T) {
	st := newServerTest(t)
	st.driver.onCreate = func() error { st.want(200, "DELETE", "/sandboxes/box", nil); return nil }
	st.want(409, "PUT", "/sandboxes/box", nil)
	st.want(404, "GET", "/sandboxes/box", nil)
	require.Empty(t, st.driver.instances)
}

func TestASandboxThatWasWrittenMeanwhileIsNotDeleted(t *testing.T) {
	st := newServerTest(t)
	st.want(200, "PUT", "/sandboxes/box", nil)
	st.store.SetHook(before("delete", func() error {
		sb, err := st.sandboxes.get(t.Context(), "box")
		_, failed := st.sandboxes.set(t.Context(), sb, Error)
		return errors.Join(err, failed)
	}))
	st.want(409, "DELETE", "/sandboxes/box", nil)
	require.Len(t, st.driver.instances, 1)
}

func TestWhatIsDownIsNotTheClientsFault(t *testing.T) {
	st := newServerTest(t)
	down := func() error { return errors.New("dial db.internal: refused") }
	st.driver.onCreate = down
	st.want(503, "PUT", "/sandboxes/box", nil)
	st.store.SetHook(before("get", down))
	w := httptest.NewRecorder()
	st.handler().ServeHTTP(w, httptest.NewRequest("GET", "/sandboxes/box", nil))
	require.Equal(t, 503, w.Code)
	require.NotContains(t, w.Body.String(), "db.internal", "no details")
}

func TestARequestIsCompletedIfTheClientHangsUp(t *testing.T) {
	st := newServerTest(t)
	ctx, hangUp := context.WithCancel(t.Context())
	st.store.SetHook(before("put", func() error { hangUp(); return nil }))
	st.handler().ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("PUT", "/sandboxes/box", nil).WithContext(ctx))
	var sb Sandbox
	st.want(200, "GET", "/sandboxes/box", &sb)
	require.Equal(t, Ready, sb.Phase)
}
