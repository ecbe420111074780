package integrations

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

func TestTheManifestOfTheDocumentIsADeploymentThatFitsTheProgram(t *testing.T) {
	manifest := read(t, "../kubernetes/periodic.yaml")
	if !strings.Contains(read(t, "../../docs/kubernetes.md"), "```yaml\n"+manifest+"```\n") {
		t.Error("docs/kubernetes.md does not show the manifest")
	}
	var deployment appsv1.Deployment
	must(t, yaml.UnmarshalStrict([]byte(manifest), &deployment)) // refuses fields that the API does not have
	if deployment.APIVersion != "apps/v1" || deployment.Kind != "Deployment" {
		t.Errorf("it is a %s of %s", deployment.Kind, deployment.APIVersion)
	}
	if selected, labels := deployment.Spec.Selector.MatchLabels, deployment.Spec.Template.Labels; !reflect.DeepEqual(selected, labels) {
		t.Errorf("it selects pods with %v, and makes pods with %v", selected, labels)
	}

	pod := deployment.Spec.Template.Spec
	container := pod.Containers[0]
	program := read(t, "../periodic/main.go")
	for _, probe := range []string{container.LivenessProbe.HTTPGet.Path, container.ReadinessProbe.HTTPGet.Path} {
		if !strings.Contains(program, `http.HandleFunc("`+probe+`"`) {
			t.Errorf("the program does not answer the probe of %s", probe)
		}
	}
	for _, probe := range []string{container.LivenessProbe.HTTPGet.Port.StrVal, container.ReadinessProbe.HTTPGet.Port.StrVal} {
		if probe != container.Ports[0].Name {
			t.Errorf("a probe asks on port %q, and the container has %q", probe, container.Ports[0].Name)
		}
	}
	for _, variable := range container.Env {
		if variable.Name != "TENURE_REPLICA_ID" && !strings.Contains(program, `os.Getenv("`+variable.Name+`")`) {
			t.Errorf("the program does not read %s", variable.Name)
		}
	}
	const release = 10 * time.Second // at most, while the database hangs
	if grace := time.Duration(*pod.TerminationGracePeriodSeconds) * time.Second; grace <= release {
		t.Errorf("a grace period of %v leaves the job no time to return", grace)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.FromSlash(path))
	must(t, err)
	return string(text)
}
